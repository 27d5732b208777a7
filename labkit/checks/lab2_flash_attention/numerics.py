"""The online softmax in plain torch, and what number formats do to it."""

from __future__ import annotations

import itertools
import math
import random
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.checks.contract import Failed, Question, require
from labkit.checks.rounded import STORED, Rounded
from labkit.checks.values import close

LAB = "lab2_flash_attention"

merge_softmax = Question(
    "merge_softmax", LAB, "two pieces merge into what the whole gives, in any order, empty ones included",
    refused=("torch.softmax", "torch.nn.functional.softmax", "torch.logsumexp"),
)  # fmt: skip

Summary = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def summary(scores: torch.Tensor, values: torch.Tensor) -> Summary:
    """(m, l, o) of a piece. scores: [rows, cols]. values: [cols, head_dim]."""
    if not scores.shape[1]:
        rows = scores.shape[0]
        return torch.full((rows,), -math.inf), torch.zeros(rows), torch.zeros(rows, values.shape[1])
    m = scores.max(dim=1).values
    p = torch.exp(scores - m[:, None])
    return m, p.sum(dim=1), (p @ values) / p.sum(dim=1, keepdim=True)


def _same(got: Summary, scores: torch.Tensor, values: torch.Tensor, look_at: str) -> float:
    require(isinstance(got, tuple) and len(got) == 3, f"{look_at}: three tensors (m, l, o) were expected")
    exact, peer = summary(scores.double(), values.double()), summary(scores, values)
    pairs = zip(("m", "l", "o"), got, exact, peer, strict=True)
    return max(close(g, e, p, look_at, name) for name, g, e, p in pairs)


def _pieces(cols: int, seed: int, loudness: float = 3.0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return torch.randn(4, cols, generator=g) * loudness, torch.randn(cols, 8, generator=g)


@merge_softmax.invariant("two halves give the whole")
def _(answer) -> float:
    s, v = _pieces(40, 1)
    got = answer(*summary(s[:, :17], v[:17]), *summary(s[:, 17:], v[17:]))
    return _same(got, s, v, "17 and 23 columns: is each weight l * exp(m - m_new)?")


@merge_softmax.invariant("the larger maximum may be on either side, and far above", share=2)
def _(answer) -> float:
    s, v = _pieces(20, 2, 1.0)
    s[:, 12:] += 300
    a, b = summary(s[:, :12], v[:12]), summary(s[:, 12:], v[12:])
    look_at = "one piece scores 300 above the other: is the common maximum subtracted?"
    return max(_same(answer(*a, *b), s, v, look_at), _same(answer(*b, *a), s, v, f"{look_at} (pieces exchanged)"))


@merge_softmax.invariant("an empty piece changes nothing, and two empty ones stay empty")
def _(answer) -> float:
    s, v = _pieces(9, 3)
    none, all_ = summary(s[:, :0], v[:0]), summary(s, v)
    ratio = max(
        _same(answer(*none, *all_), s, v, "an empty first piece"),
        _same(answer(*all_, *none), s, v, "an empty second piece"),
    )
    m, total, o = answer(*none, *none)
    require(
        bool((m == -math.inf).all() and (total == 0).all() and (o == 0).all()),
        "two empty pieces: -inf, 0 and zeros expected; what is -inf - -inf?",
    )
    return ratio


@merge_softmax.invariant("any order of five pieces gives the same")
def _(answer) -> float:
    s, v = _pieces(60, 4)
    cuts = [0, 3, 20, 21, 45, 60]
    parts = [summary(s[:, a:b], v[a:b]) for a, b in itertools.pairwise(cuts)]
    left = parts[0]
    for part in parts[1:]:
        left = answer(*left, *part)
    right = answer(*parts[3], *parts[4])
    for part in (parts[1], parts[0], parts[2]):
        right = answer(*part, *right)
    shuffled = torch.cat([torch.arange(a, b) for a, b in itertools.pairwise(cuts)])
    return max(
        _same(left, s, v, "five pieces from the left") / 2,
        _same(right, s[:, shuffled], v[shuffled], "five pieces in another order") / 2,
    )


stall_point = Question("stall_point", LAB, "the sum of ones stops where the format's spacing becomes 2")


@stall_point.invariant("it is found by adding, whatever the format's width", stops=True)
def _(answer) -> None:
    widths = random.SystemRandom().sample(range(9, 15), 2)  # anew in each run, so that no table of answers fits
    for dtype, bits in zip(STORED, widths, strict=True):
        with Rounded(dtype, bits):
            got = answer(dtype)
        require(
            got == 2**bits,
            f"{got} for {dtype} when its results are rounded to {bits} bits, where a sum of ones stops at {2**bits}: "
            "is the value found by adding in that dtype, not remembered?",
        )


@stall_point.invariant("16-bit formats")
def _(answer) -> None:
    for dtype, want in ((torch.float16, 2048), (torch.bfloat16, 256)):
        got = answer(dtype)
        require(got == want, f"{got} for {dtype}, and adding ones one after another stops at {want}")


@stall_point.invariant("fp32, found in reasonable time")
def _(answer) -> None:
    got = answer(torch.float32)
    require(got == 2**24, f"{got} for fp32, and {2**24} + 1 is the first sum that fp32 cannot hold")


softmax_base2 = Question(
    "softmax_base2", LAB, "base 2 with log2(e) folded into the scale gives the softmax in base e",
    refused=("torch.softmax", "torch.nn.functional.softmax", "torch.exp", "torch.Tensor.softmax"),
)  # fmt: skip


def _base2(answer, scores: torch.Tensor, scale: float, look_at: str) -> float:
    want = torch.softmax(scores.double() * scale, -1)
    peer = torch.softmax((scores.float() * scale), -1)
    return close(answer(scores, scale), want, peer, look_at, "the softmax")


@softmax_base2.invariant("it is the softmax in base e")
def _(answer) -> float:
    s, _v = _pieces(50, 5)
    return _base2(answer, s, 0.125, "rows sum to 1 in any base, so look at the values: is log2(e) in the scale?")


@softmax_base2.invariant("large scores do not overflow")
def _(answer) -> float:
    s, _v = _pieces(30, 6, 20.0)
    return _base2(answer, s.half().float() * 16, 1.0, "scores of several hundred: is the row's maximum subtracted?") / 8


@softmax_base2.invariant("exp2 is the only exponential")
def _(answer) -> None:
    def no_exp(*args, **kwargs):
        raise Failed("torch.exp or softmax was called: exp2 is to be the only exponential")

    s, _v = _pieces(8, 7)
    with (
        mock.patch.multiple(torch, exp=no_exp, softmax=no_exp),
        mock.patch.multiple(torch.Tensor, exp=no_exp, softmax=no_exp),
    ):
        answer(s, 1.0)


class Multiplications(TorchDispatchMode):
    """Counts the products and quotients of `size` elements that are computed before the first exp2."""

    def __init__(self, size: int):
        super().__init__()
        self.size, self.count, self.ended = size, 0, False

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func`, and count it if it is one of those."""
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.rstrip("_")
        self.ended |= name == "exp2"
        self.count += name in ("mul", "div") and not self.ended and out.numel() == self.size
        return out


@softmax_base2.invariant("one multiplication a score")
def _(answer) -> None:
    s, _v = _pieces(8, 8)
    with Multiplications(s.numel()) as seen:
        answer(s, 0.5)
    require(seen.count <= 1, f"{seen.count} multiplications of each score before exp2: fold scale and log2(e) first")


QUESTIONS = [merge_softmax, stall_point, softmax_base2]
