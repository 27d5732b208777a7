"""Cutting outliers off: by a rule, and by search."""

from __future__ import annotations

import torch

from labkit.checks.contract import Question, require
from labkit.checks.lab3_int4_quantization.cases import (
    LAB,
    SHIPPED,
    grid_of,
    grouped,
    nearest_codes,
    randn,
    refused,
    rounded,
    same_grid,
    triple_of,
)

quantize_clamped = Question(
    "quantize_clamped", LAB, "each group is cut around its own mean, and then gets the grid of what is left", SHIPPED
)


def with_outliers(rows: int, n: int, seed: int) -> torch.Tensor:
    """Rows of other widths and means, each group of 32 with an outlier."""
    weight = randn(rows, n, seed=seed) * torch.logspace(-1, 0.5, n)
    weight[:, 5::32] *= 12
    return weight + torch.linspace(-0.5, 0.5, rows)[:, None]


def cut_groups(weight: torch.Tensor, group_size: int, sigmas: float) -> torch.Tensor:
    groups = grouped(weight, group_size)
    mean, reach = groups.mean(-1, keepdim=True), sigmas * groups.std(-1, keepdim=True)
    return torch.minimum(torch.maximum(groups, mean - reach), mean + reach)


@quantize_clamped.invariant("the grid is that of the weight after the cut", share=2)
def _(answer) -> None:
    for sigmas in (3.0, 2.0):
        weight = with_outliers(4, 128, 1)
        groups, before, plain = cut_groups(weight, -1, sigmas), weight.clone(), grid_of(grouped(weight, -1), 4)[0]
        codes, scales, zeros = triple_of(answer(weight, 4, -1, sigmas), (4, 128), (4, 1))
        require(torch.equal(weight, before), "the weight itself was changed")
        require(
            not torch.allclose(scales.double(), plain, rtol=1e-3),
            "the scales are those of the whole range: cut first, then choose the grid",
        )
        look_at = f"cut at {sigmas:g} sigma of each row"
        same_grid(scales, zeros, grid_of(groups, 4), look_at)
        nearest_codes(codes.reshape(groups.shape), groups, scales, zeros, 4, look_at)


@quantize_clamped.invariant("mean and deviation are those of each group", share=2)
def _(answer) -> None:
    for group_size in (32, 64, 0):
        weight = with_outliers(4, 128, 2)
        groups = cut_groups(weight, group_size, 2.5)
        _, scales, zeros = triple_of(answer(weight, 4, group_size, 2.5), (4, 128), tuple(groups.shape[:2]))
        same_grid(scales, zeros, grid_of(groups, 4), f"groups of {group_size}: whose mean and deviation are they?")


@quantize_clamped.invariant("the cut is around the mean, not around 0")
def _(answer) -> None:
    weight = randn(3, 64, seed=3) + 6
    groups = cut_groups(weight, -1, 1.5)
    _, scales, zeros = triple_of(answer(weight, 4, -1, 1.5), (3, 64), (3, 1))
    same_grid(scales, zeros, grid_of(groups, 4), "rows around 6, cut at 1.5 sigma from their mean")


@quantize_clamped.invariant("where nothing is beyond, nothing is cut; sigmas must be positive")
def _(answer) -> None:
    weight = with_outliers(3, 96, 4)
    before = weight.clone()
    got = triple_of(answer(weight, 4, 32, 1e6), (3, 96), (3, 3))
    require(torch.equal(weight, before), "the weight itself was changed")
    same_grid(got[1], got[2], grid_of(grouped(weight, 32), 4), "a cut at a million sigma")
    refused(lambda: answer(weight, 4, -1, 0.0), (), "sigmas 0")
    refused(lambda: answer(weight, 4, -1, -3.0), (), "sigmas -3")


search_clip = Question("search_clip", LAB, "no other share of the eleven loses less in any group", SHIPPED)

SHARES = [1 - 0.05 * i for i in range(11)]


def losses(weight: torch.Tensor, bits: int, group_size: int, importance: torch.Tensor | None) -> torch.Tensor:
    """Weighted error of each candidate, [shares, rows, groups], fp64."""
    groups = grouped(weight, group_size)
    counts = torch.ones(weight.shape[1]) if importance is None else importance
    counts = counts.double().reshape(groups.shape[1], -1)
    largest = groups.abs().amax(-1, keepdim=True)
    found = []
    for share in SHARES:
        cut = torch.minimum(torch.maximum(groups, -share * largest), share * largest).reshape(weight.shape)
        lost = rounded(cut, bits, group_size).reshape(groups.shape) - groups
        found.append((lost.square() * counts).sum(-1))
    return torch.stack(found)


def best_shares(got: object, weight: torch.Tensor, bits: int, size: int, importance: torch.Tensor | None, look_at: str):
    """`got` must lose no more than the best candidate in any group, within what fp32 and ties may change."""
    errors = losses(weight, bits, size, importance)
    wanted = tuple(errors.shape[1:])
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
    require(shape == wanted, f"the shares have shape {shape}, {wanted} expected")
    off = ((got[None] - torch.tensor(SHARES)[:, None, None]).abs()).min(0)  # type: ignore[index]
    require(off.values.max().item() < 1e-4, f"{look_at}: a share is none of 1.0, 0.95, ... 0.5")
    mine, least = errors.gather(0, off.indices[None])[0], errors.min(0).values
    worse = mine > 1.002 * least
    if worse.any():
        at = tuple(worse.nonzero()[0].tolist())
        best = SHARES[int(errors[(slice(None), *at)].argmin())]
        require(
            False,
            f"{look_at}: group {list(at)} is cut at {got[at].item():.2f} and loses {mine[at] / least[at]:.2f} times"  # type: ignore[index]
            f" what it loses at {best:.2f} ({worse.double().mean():.0%} of the groups)",
        )


@search_clip.invariant("by the error of the weights", share=2)
def _(answer) -> None:
    for group_size, seed in ((-1, 5), (32, 6)):
        weight = with_outliers(6, 128, seed)
        best_shares(answer(weight, 4, group_size), weight, 4, group_size, None, f"groups of {group_size}, weight error")


@search_clip.invariant("by the error that inputs make of it: importance belongs to a column", share=3)
def _(answer) -> None:
    for group_size in (-1, 32):
        weight = with_outliers(6, 128, 7)
        importance = torch.rand(128, generator=torch.Generator().manual_seed(8)).pow(6) * 50
        importance[37] = 3000.0  # an outlier that matters
        got = answer(weight, 4, group_size, importance)
        best_shares(got, weight, 4, group_size, importance, f"groups of {group_size}, weighted by importance")


@search_clip.invariant("in other bits, and with a weight that stays as it was")
def _(answer) -> None:
    weight = with_outliers(4, 64, 9)
    before = weight.clone()
    best_shares(answer(weight, 3, 32), weight, 3, 32, None, "3 bits")
    require(torch.equal(weight, before), "the weight itself was changed")


@search_clip.invariant("of equal shares the largest")
def _(answer) -> None:
    got = answer(torch.zeros(2, 64), 4, 32)
    require((got == 1).all().item(), f"a group of zeros loses nothing at any share: {got[0, 0].item():.2f}, 1 expected")
    got = answer(with_outliers(2, 64, 10), 4, 32, torch.zeros(64))
    require((got == 1).all().item(), f"no column matters: share {got[0, 0].item():.2f}, 1 expected: nothing is gained")


QUESTIONS = [quantize_clamped, search_clip]
