"""The first two kernels: a tail mask, and a softmax that survives large scores."""

from __future__ import annotations

import math

import torch

from labkit import device
from labkit.checks import traffic
from labkit.checks.contract import Question, require
from labkit.checks.values import close, run_kernel

LAB = "lab2_flash_attention"
LOG2_E = math.log2(math.e)

vector_add = Question(
    "vector_add", LAB, "every element is added once, and nothing outside the vectors is touched", launches_kernels=True
)


def _vectors(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(n, generator=g).to(device.name()) for _ in "xy")  # type: ignore[return-value]


@vector_add.invariant("each element is read once and written once, inside its tensor", share=2, stops=True)
def _(answer) -> None:
    n = 1000
    count = traffic.stays_inside(answer, *_vectors(n))
    got = (count.bytes_loaded, count.bytes_stored)
    require(got == (8 * n, 4 * n), f"{got} bytes loaded and stored for {n} fp32 numbers, {(8 * n, 4 * n)} expected")


@vector_add.invariant("lengths that divide by the tile, and lengths that do not")
def _(answer) -> None:
    for n in (256, 1, 255, 257, 1000):
        x, y = _vectors(n, seed=n)
        got = run_kernel(answer, x, y)
        close(got, (x.double() + y.double()).cpu(), (x + y).cpu(), f"a vector of {n} elements, tiles of 256", "out")


row_softmax = Question(
    "row_softmax", LAB, "rows of any length and any scores give their softmax, read once and written once",
    refused=("torch.softmax", "torch.nn.functional.softmax"), launches_kernels=True,
)  # fmt: skip


def _rows(rows: int, cols: int, factor: float = 1.0, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    wide = torch.randn(rows, cols + 5, generator=g).to(dtype) * factor
    return wide.to(device.name())[:, :cols]


def softmax_peer(x: torch.Tensor) -> torch.Tensor:
    """Softmax of rows in fp32 with exp2, log2(e) first: a good kernel may do so, and it rounds more than torch does."""
    scaled = x.float() * LOG2_E
    p = torch.exp2(scaled - scaled.amax(-1, keepdim=True))
    return (p / p.sum(-1, keepdim=True)).to(x.dtype)


def _softmax(answer, x: torch.Tensor, look_at: str) -> float:
    got = run_kernel(answer, x)
    host = x.cpu()
    return close(got, torch.softmax(host.double(), -1), softmax_peer(host), look_at, "out")


@row_softmax.invariant("the row is read once and written once, inside its tensor", stops=True)
def _(answer) -> None:
    x = _rows(4, 100)
    count = traffic.stays_inside(answer, x)
    got, want = (count.bytes_loaded, count.bytes_stored), (4 * x.numel(), 4 * x.numel())
    require(got == want, f"{got} bytes loaded and stored, {want} expected")


@row_softmax.invariant("rows whose length is no power of two, strided")
def _(answer) -> float:
    look_at = "is what pads the row kept out of the maximum and the sum?"
    return max(_softmax(answer, _rows(3, n, seed=n), f"rows of {n}: {look_at}") for n in (1, 17, 64, 100))


@row_softmax.invariant("rows of negative scores")
def _(answer) -> float:
    return _softmax(answer, _rows(2, 50, seed=1) - 60, "all scores are below -50: does the padding win the maximum?")


@row_softmax.invariant("scores of several hundred")
def _(answer) -> float:
    return _softmax(
        answer, _rows(2, 100, 300.0, seed=2), "scores of several hundred: is the largest subtracted before exp?"
    )


@row_softmax.invariant("fp16 rows of a thousand")
def _(answer) -> float:
    return _softmax(answer, _rows(2, 1000, dtype=torch.float16, seed=3), "fp16 in, fp16 out: is the sum taken in fp32?")


QUESTIONS = [vector_add, row_softmax]
