"""GPTQ: column by column."""

from __future__ import annotations

import torch

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.cases import (
    LAB,
    SHIPPED,
    Triple,
    grid_of,
    grouped,
    nearest_codes,
    randn,
    real,
    rounded,
    same_grid,
    triple_of,
)

gptq = Question("gptq", LAB, "later columns make up for what rounding did to the output", SHIPPED)


def correlated(n: int, seed: int, tokens: int = 256) -> torch.Tensor:
    """Mean of x x^T of inputs that go together, some louder than others."""
    x = randn(tokens, n // 4, seed=seed) @ randn(n // 4, n, seed=seed + 1) + 0.3 * randn(tokens, n, seed=seed + 2)
    x = x * torch.logspace(-0.5, 0.5, n)[torch.randperm(n, generator=torch.Generator().manual_seed(seed))]
    return x.T @ x / tokens


def reference(weight: torch.Tensor, hessian: torch.Tensor, bits: int, size: int, damping: float) -> torch.Tensor:
    """What GPTQ's weights are, fp64, by elimination in the Hessian itself, with no Cholesky factor."""
    groups = grouped(weight, size)
    scales, zeros = grid_of(groups, bits)
    rest, n = weight.double().clone(), weight.shape[1]
    kept = torch.empty_like(rest)
    damped = hessian.double() + damping * hessian.double().diagonal().mean() * torch.eye(n, dtype=torch.float64)
    inverse = torch.linalg.inv(damped)
    for k in range(n):
        scale, zero = (t[:, k // groups.shape[2]] for t in (scales, zeros))
        kept[:, k] = (((rest[:, k] / scale).round() + zero).clamp(0, 2**bits - 1) - zero) * scale
        error = (rest[:, k] - kept[:, k]) / inverse[k, k]
        rest -= error[:, None] * inverse[k]
        inverse = inverse - inverse[:, k, None] * inverse[k] / inverse[k, k]
    return kept


def loss(kept: torch.Tensor, weight: torch.Tensor, hessian: torch.Tensor) -> float:
    lost = kept.double() - weight.double()
    return torch.sum(lost @ hessian.double() * lost).item()


def made(answer, weight: torch.Tensor, hessian: torch.Tensor, bits: int, size: int, **options) -> Triple:
    before = weight.clone(), hessian.clone()
    groups = grouped(weight, size)
    got = triple_of(answer(weight, hessian, bits, size, **options), tuple(weight.shape), tuple(groups.shape[:2]))
    require(torch.equal(weight, before[0]), "the weight itself was changed")
    require(torch.equal(hessian, before[1]), "the hessian itself was changed")
    require(int(got[0].max()) < 2**bits, f"a code is {int(got[0].max())}, the highest of {bits} bits is {2**bits - 1}")
    return got


@gptq.invariant("a diagonal hessian couples nothing: round to nearest")
def _(answer) -> None:
    weight, hessian = randn(6, 64, seed=1), torch.diag(torch.rand(64) + 0.1)
    codes, scales, zeros = made(answer, weight, hessian, 4, 32)
    groups = grouped(weight, 32)
    look_at = "with a diagonal hessian"
    same_grid(scales, zeros, grid_of(groups, 4), look_at)
    nearest_codes(codes.reshape(groups.shape), groups, scales, zeros, 4, look_at)


@gptq.invariant("the grids are those of the weight as it comes")
def _(answer) -> None:
    weight, hessian = randn(8, 96, seed=2), correlated(96, 3)
    for size in (-1, 32):
        _, scales, zeros = made(answer, weight, hessian, 4, size)
        same_grid(scales, zeros, grid_of(grouped(weight, size), 4), f"groups of {size}: is the grid chosen before?")


@gptq.invariant("the output loses as little as it does with GPTQ's update of each column", share=4)
def _(answer) -> float:
    ratios = [0.0]
    for bits, size, seed in ((4, -1, 4), (3, 32, 5), (4, 16, 6), (2, 64, 7)):
        weight, hessian = randn(24, 64, seed=seed), correlated(64, seed + 10)
        mine = loss(real(made(answer, weight, hessian, bits, size), weight.shape), weight, hessian)
        exact = loss(reference(weight, hessian, bits, size, 0.01), weight, hessian)
        plain = loss(rounded(weight, bits, size), weight, hessian)
        allowed = 1.05 * exact  # a tie that fp32 breaks the other way changes all the columns after it
        require(
            mine <= allowed,
            f"{bits} bits, groups of {size}: the output error is {mine / exact:.2f} times that of GPTQ; round to"
            f" nearest has {plain / exact:.2f} times: does each column's error reach all columns"
            " to its right, and no other?",
        )
        ratios.append(mine / allowed)
    return max(ratios)


@gptq.invariant("damping is a share of the mean diagonal, and makes a singular hessian fit")
def _(answer) -> None:
    weight = randn(8, 64, seed=8)
    x = randn(10, 64, seed=9) * 0.01
    hessian = x.T @ x / 10
    try:
        got = real(made(answer, weight, hessian, 4, -1), weight.shape)
    except torch.linalg.LinAlgError as error:
        raise Failed(f"10 inputs of 64 channels give a singular hessian, and damping did not help: {error}") from None
    exact = loss(reference(weight, hessian, 4, -1, 0.01), weight, hessian)
    require(
        loss(got, weight, hessian) <= 1.5 * exact,
        f"quiet inputs: the output error is {loss(got, weight, hessian) / exact:.1f} times that of GPTQ: is damping"
        " relative to the mean of the diagonal?",
    )
    much = real(made(answer, weight, correlated(64, 20), 4, -1, damping=1e6), weight.shape)
    off = (much - rounded(weight, 4, -1)).abs().gt(1e-4).double().mean().item()
    require(off < 0.01, f"damping 1e6 drowns the hessian, and still {off:.0%} of the codes are not the nearest")


QUESTIONS = [gptq]
