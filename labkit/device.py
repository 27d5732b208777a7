"""What hardware is here. The tier is decided in this one place."""

from __future__ import annotations

import torch


def tier() -> str:
    """ "cuda" where a CUDA device is used, else "interpreter"."""
    return "cuda" if torch.cuda.is_available() else "interpreter"


def name() -> str:
    """The device that kernels run on: "cuda" or "cpu"."""
    return "cuda" if tier() == "cuda" else "cpu"
