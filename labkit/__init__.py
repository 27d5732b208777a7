"""What the notebooks of Inference Camp import: checks, meters, pictures and workloads.

Importing labkit picks the tier once: with no CUDA device, Triton kernels are interpreted. Triton reads
TRITON_INTERPRET when `@triton.jit` decorates, so the variable has to be set before the first kernel is defined.
"""

import os

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from labkit.checks import check, score  # noqa: E402  (after the tier is picked)

__version__ = "0.1.0"
__all__ = ["__version__", "check", "score"]
