"""Which of two kernels runs: the portable one in plain `tl`, or the one written for Hopper."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable

import torch

from kernels.validate import require


def takes_hopper(name: str, variant: str | None, q: torch.Tensor, judge: Callable[[], tuple[str | None, bool]]) -> bool:
    """Whether Hopper's kernel of operation `name` is to run on valid arguments, of which q is one.

    variant: "tl", "hopper", or None for the faster one; anything else is refused. judge: gives why Hopper's cannot run
    (None if it can) and whether it is the faster one; called only where the answer can matter, so that a machine with
    no Hopper GPU never imports Gluon. Raises ValueError if Hopper's kernel is demanded and cannot run.
    """
    require(variant in (None, "tl", "hopper"), f'variant: expected "tl", "hopper" or None, got {variant!r}')
    if variant == "tl" or (variant is None and not _is_hopper(q.device)):
        return False
    reason, faster = judge()
    require(variant is None or reason is None, f"variant: 'hopper' cannot run here: {reason}")
    if reason is not None:
        _warn_once(name, reason)
        return False
    return variant == "hopper" or faster


def _is_hopper(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.get_device_capability(device)[0] == 9


@functools.cache
def _warn_once(name: str, reason: str) -> None:
    warnings.warn(f"{name}: {reason}, so the portable kernel runs instead of Hopper's", stacklevel=4)
