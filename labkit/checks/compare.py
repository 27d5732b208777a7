"""Comparing an answer with an oracle, within a tolerance that is derived, not guessed.

An answer may be as wrong as twice a same-precision reference is, against a higher-precision oracle, plus one unit in
the last place of the output's largest value. The rule is that of FlashAttention's tests (Dao-AILab/flash-attention,
tests/test_flash_attn.py), without their constant.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch

from labkit.checks.contract import Failed

Array = torch.Tensor | np.ndarray

# Quiet NaNs that arithmetic does not make, so that an element nobody wrote is told from one that was computed wrong.
POISON_BITS = {
    torch.float16: (torch.int16, 0x7E5A),
    torch.bfloat16: (torch.int16, 0x7FDA),
    torch.float32: (torch.int32, 0x7FC05A5A),
    torch.float64: (torch.int64, 0x7FF8005A5A5A5A5A),
}


def poison(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` in place, any strides, with a NaN of our own (integers: their smallest value) and return it.

    An element that still holds it after a call was not written, and `close` says so.
    """
    if tensor.dtype in POISON_BITS:
        bits, pattern = POISON_BITS[tensor.dtype]
        tensor.view(bits).fill_(pattern)
    elif tensor.dtype == torch.bool or tensor.is_complex() or tensor.is_floating_point():
        raise TypeError(
            f"poison: dtype {tensor.dtype} has no value to spare; use a float of 16 bits or more, or an int"
        )
    else:
        tensor.fill_(torch.iinfo(tensor.dtype).min)
    return tensor


def unit_in_last_place(value: float, dtype: torch.dtype) -> float:
    """The distance from |value| to the next larger number of `dtype`."""
    info = torch.finfo(dtype)
    exponent = math.frexp(max(abs(value), info.tiny))[1] - 1
    return info.eps * 2.0**exponent


def allowed_error(oracle: Array, same_precision: Array, dtype: torch.dtype) -> float:
    """2 * max|same_precision - oracle| + one unit in the last place, in `dtype`, of max|oracle|."""
    exact, peer = _tensor(oracle).double(), _tensor(same_precision).double()
    finite = exact.isfinite() & peer.isfinite()
    largest = exact[exact.isfinite()].abs().max().item() if exact.isfinite().any() else 0.0
    spread = (peer - exact)[finite].abs().max().item() if finite.any() else 0.0
    return 2 * spread + unit_in_last_place(largest, dtype)


def close(actual: Any, oracle: Array, same_precision: Array, what: str = "o", look_at: str = "") -> float:
    """The largest error of `actual` over the allowed error: at most 1. Raises Failed with one sentence otherwise.

    oracle: computed in higher precision. same_precision: a straightforward reference in the answer's own dtype, which
    is also the dtype that `actual` must have. what: the answer's name. look_at: said first when values differ.
    NaN and infinities must stand where the oracle has them. Integers are compared with `equal`.
    """
    peer = _tensor(same_precision)
    if not peer.is_floating_point():
        raise TypeError(f"close compares floats, and {what} has dtype {peer.dtype}: use equal")
    got = _matching(actual, peer, what)
    exact = _tensor(oracle).double()
    if exact.shape != peer.shape:
        raise ValueError(f"the oracle has shape {tuple(exact.shape)}, the same-precision reference {tuple(peer.shape)}")
    _written(got, what)
    _same_specials(got, exact, what)
    allowed = allowed_error(exact, peer, got.dtype)
    error = torch.where(exact.isfinite(), (got.double() - exact).abs(), 0.0)
    ratio = error.max().item() / allowed if error.numel() else 0.0
    wrong = error > allowed
    if wrong.any():
        prefix = f"{look_at}: " if look_at else ""
        raise Failed(
            f"{prefix}{_first(wrong, got, exact, what)}; "
            f"the error is {ratio:.3g} times what is allowed ({allowed:.3g}), {_share(wrong)}"
        )
    return ratio


def equal(actual: Any, expected: Array, what: str = "the result", look_at: str = "", within: int = 0) -> None:
    """Raise Failed unless `actual` has the shape, dtype and values of `expected`; integers may differ by `within`."""
    want = _tensor(expected)
    got = _matching(actual, want, what)
    if want.is_floating_point():
        wrong = ~((got == want) | (got.isnan() & want.isnan()))
    else:
        wrong = (got.long() - want.long()).abs() > within
    if wrong.any():
        prefix = f"{look_at}: " if look_at else ""
        raise Failed(f"{prefix}{_first(wrong, got, want, what)}; {_share(wrong)}")


def _tensor(value: Array) -> torch.Tensor:
    return torch.from_numpy(np.array(value, order="C")) if isinstance(value, np.ndarray) else value.detach().cpu()


def _matching(actual: Any, expected: torch.Tensor, what: str) -> torch.Tensor:
    """`actual` as a CPU tensor, refused by name if it is no array or has another shape or dtype."""
    if not isinstance(actual, (torch.Tensor, np.ndarray)):
        raise Failed(f"{what} is of type {type(actual).__name__}, a tensor was expected: does every path return it?")
    got = _tensor(actual)
    if got.shape != expected.shape:
        raise Failed(f"{what} has shape {tuple(got.shape)}, {tuple(expected.shape)} was expected")
    if got.dtype != expected.dtype:
        raise Failed(f"{what} has dtype {_name(got.dtype)}, {_name(expected.dtype)} was expected")
    return got


def _written(got: torch.Tensor, what: str) -> None:
    if got.dtype not in POISON_BITS:
        return
    bits, pattern = POISON_BITS[got.dtype]
    unwritten = got.contiguous().view(bits) == pattern
    if unwritten.any():
        raise Failed(f"{what}[{_index(unwritten)}] was never written, {_share(unwritten)}: does a program own it?")


def _same_specials(got: torch.Tensor, exact: torch.Tensor, what: str) -> None:
    nan = got.isnan() & ~exact.isnan()
    if nan.any():
        raise Failed(
            f"{what}[{_index(nan)}] is NaN, {_share(nan)}: look for 0/0, inf - inf, or a maximum that stays -inf"
        )
    special = ~exact.isfinite() & ~((got.double() == exact) | (got.isnan() & exact.isnan()))
    infinite = got.isinf() & exact.isfinite()
    for wrong in (special, infinite):
        if wrong.any():
            raise Failed(f"{_first(wrong, got, exact, what)}, {_share(wrong)}: look at masking and overflow")


def _first(wrong: torch.Tensor, got: torch.Tensor, want: torch.Tensor, what: str) -> str:
    at = tuple(wrong.nonzero()[0].tolist())
    return f"{what}[{_index(wrong)}] is {_value(got[at])}, {_value(want[at])} was expected"


def _index(wrong: torch.Tensor) -> str:
    return ", ".join(map(str, wrong.nonzero()[0].tolist())) or "()"


def _value(element: torch.Tensor) -> str:
    return f"{element.item():.6g}" if element.is_floating_point() else str(element.item())


def _share(wrong: torch.Tensor) -> str:
    return f"{int(wrong.sum())} of {wrong.numel()} elements"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
