"""What torch and numpy are set to while an answer is checked: their defaults, whatever the notebook has set.

A default dtype of float64 or gradients switched off, be it by a scratch cell or by another answer when it was called,
would fail answers that have nothing to do with it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import torch


@contextlib.contextmanager
def neutral() -> Iterator[None]:
    """Set the defaults for the time of the block, and afterwards what was set before it, whatever the block set."""
    dtype, place = torch.get_default_dtype(), torch.get_default_device()
    precision = torch.get_float32_matmul_precision()
    strict = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with torch.enable_grad(), np.errstate(divide="warn", over="warn", under="ignore", invalid="warn"):
        try:
            _set_strict(False, False)
            torch.set_float32_matmul_precision("highest")
            torch.set_default_dtype(torch.float32)
            _set_place(torch.device("cpu"))
            yield
        finally:
            _set_place(place)
            torch.set_default_dtype(dtype)
            torch.set_float32_matmul_precision(precision)
            _set_strict(*strict)


def _set_place(place: torch.device) -> None:
    if place != torch.get_default_device():
        torch.set_default_device(None if place == torch.device("cpu") else place)


def _set_strict(strict: bool, warn_only: bool) -> None:
    """Only where it is a change: to set it, torch imports its compiler, which takes a second."""
    if strict != torch.are_deterministic_algorithms_enabled():
        torch.use_deterministic_algorithms(strict, warn_only=warn_only)
