"""Five planted faults. Each question has one invariant, so that it pays only for its fault being gone."""

from __future__ import annotations

import torch

from labkit import device
from labkit.checks import compare, traffic
from labkit.checks.contract import Question, require
from labkit.checks.values import close, run_kernel, run_launching

LAB = "lab2_flash_attention"


def _question(name: str, about: str) -> Question:
    return Question(name, LAB, about, launches_kernels=True)


def _random(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype).to(device.name())


fixed_row_max = _question("fixed_row_max", "the padding of a row never wins")


@fixed_row_max.invariant("rows of negative numbers, of any length")
def _(answer) -> None:
    for cols in (3, 50, 64, 100):
        x = -1 - _random(4, cols, seed=cols).abs()
        x[0] *= 1e30  # no number is small enough for the padding
        got = run_kernel(answer, x)
        compare.equal(
            got, x.max(dim=1).values, "out", f"rows of {cols} negative numbers: what do the lanes past the end hold?"
        )


fixed_scale_rows = _question("fixed_scale_rows", "rows may be strided")


@fixed_scale_rows.invariant("a slice of a wider tensor")
def _(answer) -> None:
    x, factor = _random(5, 90, seed=1)[:, 10:60], _random(5, seed=2)
    got = run_kernel(answer, x, factor)
    compare.equal(
        got, x * factor[:, None], "out", "a slice x[:, 10:60] of rows of 90: which stride does each address use?"
    )


fixed_sum_of_squares = _question("fixed_sum_of_squares", "the sum is as exact as fp32 allows")


@fixed_sum_of_squares.invariant("long rows of fp16, and numbers whose square does not fit into it")
def _(answer) -> float:
    long, large = _random(2, 5000, seed=3, dtype=torch.float16), _random(2, 100, seed=4, dtype=torch.float16) * 300
    ratios = []
    for x, look_at in (
        (long, "5,000 fp16 numbers: in which dtype is the running sum?"),
        (large, "300 squared is infinite in fp16: convert before you square"),
    ):
        exact, peer = (x.cpu().to(t).square().sum(1) for t in (torch.float64, torch.float32))
        got = run_kernel(answer, x)
        ratios.append(close(got, exact, peer * (1 + 1e-6), look_at, "out"))  # any order of summing is fine
    return max(ratios)


fixed_running_total = _question("fixed_running_total", "no program reads what another one writes")


def _total(got: torch.Tensor, x: torch.Tensor, look_at: str) -> None:
    exact = x.cpu().double().cumsum(0)
    error = (got.cpu().double() - exact).abs().max().item()
    require(error < 1e-3, f"{look_at}: the largest error is {error:.3g}")


@fixed_running_total.invariant("the totals are right, in any order of programs")
def _(answer) -> None:
    for n in (1, 32, 33, 200):
        x = _random(n, seed=n)
        _total(run_launching(answer, x), x, f"a vector of {n}: is everything before the block counted?")
    x = _random(300, seed=5)
    for seed in (1, 2, 3):
        count = traffic.stays_inside(answer, x, shuffle=seed)
        _total(
            count.result, x, "with the programs in another order: a program reads what another one has not written yet"
        )


fixed_differences = _question("fixed_differences", "no element outside the vectors is touched")


@fixed_differences.invariant("the differences are right, and every access is inside its tensor")
def _(answer) -> None:
    for n in (2, 64, 65, 200):
        x = _random(n, seed=n)
        got = run_kernel(answer, x)
        compare.equal(got, x[1:] - x[:-1], "out", f"a vector of {n}")


QUESTIONS = [fixed_row_max, fixed_scale_rows, fixed_sum_of_squares, fixed_running_total, fixed_differences]
