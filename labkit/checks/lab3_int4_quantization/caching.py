"""A KV cache in few bits, and the controller that chooses how few."""

from __future__ import annotations

import itertools
import math
import random
from collections.abc import Sequence

import torch

from labkit import device
from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED

kv_round_trip = Question(
    "kv_round_trip", LAB, "each token and head has a grid of its own, of the fp16 numbers stored", SHIPPED
)
bits_by_norm = Question("bits_by_norm", LAB, "between the two thresholds nothing changes", SHIPPED)


def rounded(x: torch.Tensor, bits: int) -> torch.Tensor:
    """The oracle, in fp64 on the CPU from fp16 scale and offset."""
    host, top = x.cpu(), 2**bits - 1
    low, high = host.amin(-1, keepdim=True), host.amax(-1, keepdim=True)
    scale, offset = ((high - low) / top).half().double(), low.half().double()
    codes = ((host.double() - offset) / torch.where(scale == 0, 1.0, scale)).round().clamp(0, top)
    return codes * scale + offset


def wrong_share(got: object, x: torch.Tensor, bits: int) -> float:
    """Share of the numbers that are neither the oracle's nor, where a number lies between two steps, its neighbour."""
    require(isinstance(got, torch.Tensor) and got.shape == x.shape, f"a tensor of {list(x.shape)} was expected")
    want, top = rounded(x, bits), 2**bits - 1
    step = ((x.cpu().amax(-1, keepdim=True) - x.cpu().amin(-1, keepdim=True)) / top).half().double()
    off = (got.detach().cpu().double() - want).abs()  # type: ignore[attr-defined]
    near = ((x.cpu().double() - want).abs() - step / 2).abs() < 1e-4 * step + 1e-6
    tiny = 1e-5 * (1 + want.abs())
    return ((off > tiny) & ~(near & (off < step + tiny))).double().mean().item()


def _made(shape: tuple[int, ...], seed: int, shift: float = 0.0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    size = torch.logspace(-1, 1, shape[0])[:, None, None] * torch.logspace(-1, 0.5, shape[1])[None, :, None]
    return ((torch.randn(shape, generator=g) + shift) * size).to(device.name())


def _agrees(answer, x: torch.Tensor, bits: int, look_at: str) -> None:
    share = wrong_share(answer(x, bits), x, bits)
    require(share == 0, f"{bits} bits: {share:.1%} of the numbers are not on their grid: {look_at}")


@kv_round_trip.invariant("loud and quiet tokens and heads, at 4, 6 and 8 bits", share=2)
def _(answer) -> None:
    for bits in (4, 6, 8, 2):
        _agrees(
            answer, _made((9, 3, 64), bits), bits, "does each (token, head) have its own scale, of 2**bits - 1 steps?"
        )


@kv_round_trip.invariant("rows far from zero")
def _(answer) -> None:
    for shift in (20.0, -30.0):
        _agrees(
            answer,
            _made((5, 2, 32), 3, shift),
            4,
            f"numbers about {shift}: the grid goes from the least to the greatest",
        )


@kv_round_trip.invariant("codes are made with the scale and the offset that are stored")
def _(answer) -> None:
    x = _made((6, 2, 64), 4, 300.0)
    _agrees(
        answer,
        x,
        8,
        "offset and scale are rounded to fp16 first, then codes are chosen, from 0 to 2**bits - 1, then used to read",
    )


@kv_round_trip.invariant("rows of equal numbers")
def _(answer) -> None:
    x = torch.full((2, 2, 16), 0.5, device=device.name())
    x[1] = 0.0
    got = answer(x, 4)
    require(
        bool(torch.equal(got.cpu(), x.cpu())), "a row of equal numbers has a scale of 0, and comes back as its offset"
    )


def controlled(norms: Sequence[float], high: float, low: float) -> list[int]:
    """The oracle: for each step, the last norm that lay outside the band decides."""
    outside = [(n > high, n < low) for n in norms]
    chosen = []
    for step in range(len(norms)):
        last = next((up for up, down in reversed(outside[: step + 1]) if up or down), False)
        chosen.append(6 if last else 4)
    return chosen


@bits_by_norm.invariant("the example, and norms at the thresholds")
def _(answer) -> None:
    cases: tuple[tuple[list[float], str], ...] = (
        ([70, 70], "the first state is 4"),
        ([10, 120, 70, 40, 70], "between the thresholds the state stays as it was"),
        ([100, 100.5, 50, 49.5, 100], "a norm that equals a threshold changes nothing"),
    )
    for norms, look_at in cases:
        got, want = list(answer(norms, 100, 50)), controlled(norms, 100, 50)
        require(got == want, f"norms {norms}, high 100, low 50: {got}, {want} expected: {look_at}")
    require(list(answer([], 2.0, 1.0)) == [], "no norms give no bits")


@bits_by_norm.invariant("norms that tremble about one threshold switch once")
def _(answer) -> None:
    rng = random.Random(0)
    norms = [60 + 50 * math.sin(n / 9) + rng.uniform(-6, 6) for n in range(200)]
    for high, low in ((80, 40), (60, 60), (104, 20)):
        got, want = list(answer(norms, high, low)), controlled(norms, high, low)
        require(len(got) == len(want), f"{len(norms)} norms give {len(got)} entries: one for each norm was expected")
        switches, least = (sum(a != b for a, b in itertools.pairwise(bits)) for bits in (got, want))
        at = next((n for n, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), None)
        require(
            at is None,
            f"a noisy wave, high {high}, low {low}, {switches} switches where {least} were expected: "
            f"step {at} of norm {norms[at or 0]:.1f} is in {got[at or 0]} bits, {want[at or 0]} expected",
        )


@bits_by_norm.invariant("thresholds the wrong way round are refused")
def _(answer) -> None:
    try:
        answer([1.0], 50, 100)
    except ValueError as error:
        require("low" in str(error) and "high" in str(error), f"the message must name low and high: {error}")
        return
    raise Failed("low above high must raise ValueError: such a controller would switch at every step")


QUESTIONS = [kv_round_trip, bits_by_norm]
