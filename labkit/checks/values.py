"""Calling an answer with its outputs poisoned, and comparing what it gives, with what to look at said first."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.checks import compare, traffic
from labkit.checks.contract import Failed, require
from labkit.triton_internals import launched


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what torch.empty and torch.empty_like give with poison, so that an output nobody writes is seen."""

    def poisoned(make):
        def allocate(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return compare.poison(tensor) if tensor.dtype in compare.POISON_BITS else tensor

        return allocate

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
    ):
        yield


PRODUCTS = {
    "mm", "bmm", "addmm", "baddbmm", "addbmm", "mv", "addmv", "dot", "vdot", "linear", "convolution",
    "_addmm_activation",
}  # fmt: skip
REDUCTIONS = {
    "sum", "mean", "prod", "nansum", "linalg_vector_norm", "amax", "max", "exp", "exp2", "cumsum", "logsumexp",
    "_softmax", "_log_softmax",
}  # fmt: skip


class _NoTorch(TorchDispatchMode):
    """Refuses some of torch's operations while it is on, whatever name the answer calls them by."""

    def __init__(self, refused: set[str]):
        super().__init__()
        self._refused = refused

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in self._refused or name.startswith("_scaled_dot_product"):
            raise Failed(f"torch's `{name}` does work that the kernel is to do")
        return func(*args, **(kwargs or {}))


def run(answer: Any, *arguments: Any, refused: set[str] | None = None, **options: Any) -> Any:
    """Call an answer with poisoned allocations. refused: torch operations that it may not use; None for no rule.

    An answer that launches a kernel and lets torch do the work is caught here: it gives the right values.
    """
    with poisoned_allocations(), contextlib.nullcontext() if refused is None else _NoTorch(refused):
        return answer(*arguments, **options)


def run_kernel(answer: Any, *arguments: Any, **options: Any) -> Any:
    """Call a kernel's wrapper: it may allocate, view and copy, and leaves products and reductions to the kernel."""
    return run_launching(answer, *arguments, refused=PRODUCTS | REDUCTIONS, **options)


def run_launching(answer: Any, *arguments: Any, refused: set[str] | None = None, **options: Any) -> Any:
    """`run`, for an answer that must launch a kernel. One that gives no numbers at all need not.

    The call is counted first, on copies. An access outside its tensor is seen there and not carried out; run for real,
    it ends the process on one day and passes unseen on another, as the memory beside the tensor happens to be used.
    """
    traffic.inside(answer, *copy.deepcopy(arguments), **options)
    with launched() as kernels:
        result = run(answer, *arguments, refused=refused, **options)
    given = result if isinstance(result, tuple) else (result,)
    empty = all(isinstance(t, torch.Tensor) and t.numel() == 0 for t in given)
    require(bool(kernels) or empty, "no Triton kernel was launched: this question asks for a kernel")
    return result


NOT_ABOUT_VALUES = ("has shape", "has dtype", "was never written", "is of type")


def close(got: object, oracle: torch.Tensor, peer: torch.Tensor, look_at: str, what: str = "o") -> float:
    """compare.close, with `look_at` first in a message about values, NaN and infinities included."""
    try:
        return compare.close(got, oracle, peer, what, look_at=look_at)
    except Failed as failure:
        message = str(failure)
        about_values = not any(words in message for words in NOT_ABOUT_VALUES)
        raise Failed(f"{look_at}: {message}" if about_values and not message.startswith(look_at) else message) from None
