"""AWQ: the scale search, and the folding that keeps the function."""

from __future__ import annotations

import torch

from labkit.checks.contract import Question, require
from labkit.checks.lab3_int4_quantization.cases import LAB, SHIPPED, randn, rounded

fold_awq = Question("fold_awq", LAB, "the function stays the same, and no other alpha loses less", SHIPPED)

ALPHAS = [0.05 * i for i in range(20)]


def layer(seed: int, rows: tuple[int, ...] = (24, 16), n: int = 64, loud: float = 30.0):
    """A gain, matrices that read what it writes, and inputs with a few loud channels, whose weights matter."""
    gain, inputs = randn(n, seed=seed).abs() + 0.5, randn(96, n, seed=seed + 1)
    inputs[:, ::13] *= loud
    return gain, [randn(r, n, seed=seed + 2 + i) for i, r in enumerate(rows)], inputs


def output_loss(weights: list[torch.Tensor], scales: torch.Tensor, inputs: torch.Tensor, bits: int, size: int) -> float:
    """What rounding the scaled weights does to the outputs, fp64."""
    total = 0.0
    for weight in weights:
        lost = rounded(weight.double() * scales.double(), bits, size) / scales.double() - weight.double()
        total += (inputs.double() @ lost.T).square().sum().item()
    return total


def candidates(inputs: torch.Tensor) -> list[torch.Tensor]:
    loudness = inputs.double().abs().mean(0).clamp(min=1e-4)
    powers = [loudness**alpha for alpha in ALPHAS]
    return [p / (p.max() * p.min()).sqrt() for p in powers]


@fold_awq.invariant("what the layers compute stays the same", share=2, stops=True)
def _(answer) -> None:
    gain, weights, inputs = layer(1)
    normed = inputs / gain  # what the norm gives before its gain
    before = [(normed * gain) @ w.T for w in weights]
    scales = answer(gain, weights, inputs, 4, -1)
    require(
        isinstance(scales, torch.Tensor) and tuple(scales.shape) == (64,),
        "the scales were expected, one for each input",
    )
    require(
        (scales.max() / scales.min()).item() > 1.5,
        "the scales are all the same, where alpha 0.5 loses less: is it the error of the output that is compared, with"
        " the scale undone after rounding?",
    )
    for w, want in zip(weights, before, strict=True):
        off = ((normed * gain) @ w.T - want).abs().max() / want.abs().max()
        require(
            off.item() < 1e-4,
            f"the outputs changed by {off.item():.1%}: weights are multiplied by s and what is before divided by s, in"
            " place, each once",
        )


@fold_awq.invariant("what was folded in are the scales that are given back")
def _(answer) -> None:
    gain, weights, inputs = layer(2)
    old = gain.clone(), [w.clone() for w in weights], inputs.clone()
    scales = answer(gain, weights, inputs, 4, 32)
    require(torch.equal(inputs, old[2]), "the inputs were changed")
    for w, was in zip(weights, old[1], strict=True):
        require(
            torch.allclose(w, was * scales, rtol=1e-4),
            "a weight is not what it was times the scales: on which side are they?",
        )
    require(torch.allclose(gain, old[0] / scales, rtol=1e-4), "`before` is not what it was over the scales")


@fold_awq.invariant("a matrix before: its rows write the channels")
def _(answer) -> None:
    _, weights, inputs = layer(3)
    matrix = randn(64, 64, seed=9)
    was = matrix.clone()
    scales = answer(matrix, weights, inputs, 4, -1)
    require(
        torch.allclose(matrix, was / scales[:, None], rtol=1e-4),
        "`before` is a matrix, and its rows are not what they were over the scales",
    )


@fold_awq.invariant("of the twenty alphas the one that loses least of the output", share=3)
def _(answer) -> None:
    for seed, bits, size, loud in ((4, 4, -1, 30.0), (5, 3, 32, 8.0), (6, 4, 16, 0.05), (7, 3, -1, 3.0)):
        gain, weights, inputs = layer(seed, loud=loud)
        weights[0][:, ::13] /= 50  # what the first matrix would like is not what the second needs
        was = [w.clone() for w in weights]
        scales = answer(gain, weights, inputs, bits, size)
        tried = [output_loss(was, c, inputs, bits, size) for c in candidates(inputs)]
        mine, least = output_loss(was, scales, inputs, bits, size), min(tried)
        off = min((scales.double() / c - 1).abs().max().item() for c in candidates(inputs))
        look_at = f"{bits} bits, groups of {size}, some channels {loud:g} times as loud"
        require(
            off < 1e-3,
            f"{look_at}: the scales are none of the candidates mean|x|^alpha, divided by sqrt(max * min)",
        )
        require(
            mine < 1.002 * least,
            f"{look_at}: the scales found lose {mine / least:.2f} times what alpha"
            f" {ALPHAS[tried.index(least)]:.2f} loses: is it the error of the output that is compared, of all weights?",
        )


@fold_awq.invariant("a channel that is always 0 breaks nothing")
def _(answer) -> None:
    gain, weights, inputs = layer(8)
    inputs[:, 3] = 0.0
    was = [w.clone() for w in weights]
    scales = answer(gain, weights, inputs, 4, -1)
    finite = all(torch.isfinite(t).all().item() for t in (scales, gain, *weights))
    require(finite and (scales > 0).all().item(), "with a channel that is always 0, scales or weights are not finite")
    least = min(output_loss(was, c, inputs, 4, -1) for c in candidates(inputs))
    mine = output_loss(was, scales, inputs, 4, -1)
    require(mine < 1.002 * least, f"with a channel that is always 0, {mine / least:.1f} times the least error is left")


QUESTIONS = [fold_awq]
