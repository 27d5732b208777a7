"""What the notebooks of Inference Camp import: checks, meters, pictures and workloads.

Importing labkit picks the tier once: with no CUDA device, Triton kernels are interpreted. Triton reads
TRITON_INTERPRET when `@triton.jit` decorates, its own library included, so the variable has to be set before the first
`import triton`. All else is imported when it is first used, so that the `labkit` command answers at once.
"""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.checks import check, score

__version__ = "0.1.0"
__all__ = ["__version__", "check", "score"]


def _cuda_is_here() -> bool:
    """Whether torch can use a CUDA device. Where no NVIDIA driver is installed, torch need not be asked."""
    try:
        ctypes.CDLL("nvcuda.dll" if os.name == "nt" else "libcuda.so.1")
    except OSError:
        return False
    # Asked through NVML: the CUDA runtime's own count would leave every forked process without CUDA.
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")
    import torch

    return torch.cuda.is_available()


if not _cuda_is_here():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if "triton" in sys.modules:  # imported first, as a sorted list of imports has it
        importlib.import_module("labkit.triton_internals").interpret_library()


def __getattr__(name: str) -> Any:
    """`labkit.check`, `labkit.score` and the modules of labkit, imported on first use."""
    if name in ("check", "score"):
        return getattr(importlib.import_module("labkit.checks"), name)
    if not name.startswith("_") and importlib.util.find_spec(f"labkit.{name}"):
        return importlib.import_module(f"labkit.{name}")
    raise AttributeError(f"module 'labkit' has no attribute {name!r}")
