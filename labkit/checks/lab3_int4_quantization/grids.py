"""Affine grids, and how many numbers share one."""

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
    same_grid,
    triple_of,
)

REFUSED = ("torch.ao", "torch.quantization", "torch.quantize_per_tensor", "torch.quantize_per_channel")
GIVEN = "labkit.quantlab.given"  # what later questions may use: each name from the question after it on
affine_quantize = Question(
    "affine_quantize",
    LAB,
    "codes, scale and zero are those of the grid that covers each row",
    SHIPPED,
    (*REFUSED, GIVEN),
)


@affine_quantize.invariant("the examples of the docstring")
def _(answer) -> None:
    x = torch.tensor([-1.0, 0.0, 2.0])
    for symmetric, codes, zero in ((False, [0, 5, 15], 5), (True, [4, 8, 15], 8)):
        got = triple_of(answer(x, 4, symmetric), (3,), ())
        look_at = f"[-1, 0, 2] in 4 bits, {'symmetric' if symmetric else 'asymmetric'}"
        require(int(got[2]) == zero, f"{look_at}: zero is {int(got[2])}, {zero} expected")
        require(got[0].tolist() == codes, f"{look_at}: codes are {got[0].tolist()}, {codes} expected")


@affine_quantize.invariant("asymmetric, each row has the grid of its own range", share=2)
def _(answer) -> None:
    for bits in (2, 3, 4, 8):
        x = randn(3, 5, 64, seed=bits) * torch.tensor([0.01, 1.0, 50.0])[:, None, None]
        codes, scale, zero = triple_of(answer(x, bits), (3, 5, 64), (3, 5))
        look_at = f"{bits} bits, asymmetric"
        same_grid(scale, zero, grid_of(x, bits), look_at)
        nearest_codes(codes, x, scale, zero, bits, look_at)


@affine_quantize.invariant("the range holds 0 also where all numbers are on one side of it")
def _(answer) -> None:
    for sign, zero in ((1.0, 0), (-1.0, 15)):
        x = sign * (randn(2, 40).abs() + 3)
        codes, scale, got = triple_of(answer(x, 4), (2, 40), (2,))
        side = "above" if sign > 0 else "below"
        require(
            bool((got == zero).all()),
            f"all numbers {side} 0: zero is {int(got[0])}, {zero} expected: is 0 within the range?",
        )
        same_grid(scale, got, grid_of(x, 4), f"all numbers {side} 0")
        nearest_codes(codes, x, scale, got, 4, f"all numbers {side} 0")


@affine_quantize.invariant("symmetric, zero is the middle code and both ends lose at most half a step")
def _(answer) -> None:
    for bits in (2, 4, 8):
        x = randn(4, 64, seed=bits)
        x[0, 0], x[1, 0] = 9.0, -9.0
        codes, scale, zero = triple_of(answer(x, bits, True), (4, 64), (4,))
        top, middle = 2**bits - 1, 2 ** (bits - 1)
        require(
            bool((zero == middle).all()),
            f"{bits} bits, symmetric: zero is {int(zero[0])}, the middle code is {middle}",
        )
        lost = ((codes.double() - middle) * scale.double()[:, None] - x).abs().amax(-1) / scale
        require(
            lost.max().item() < 0.51,
            f"{bits} bits, symmetric: a number is off by {lost.max().item():.2f} steps; codes end at {top}: does the"
            " largest one fit, or has it wrapped?",
        )
        same_grid(scale, zero, grid_of(x, bits, True), f"{bits} bits, symmetric: are there {top} steps in the range?")


@affine_quantize.invariant("a row of zeros comes back as zeros")
def _(answer) -> None:
    for symmetric in (False, True):
        codes, scale, zero = triple_of(answer(torch.zeros(2, 8), 4, symmetric), (2, 8), (2,))
        require(bool((scale > 0).all()), f"a row of zeros: its scale is {scale[0].item()}, which cannot divide")
        require(bool((codes == zero[:, None]).all()), "a row of zeros: its codes are not its zero")


quantize_weight = Question(
    "quantize_weight",
    LAB,
    "each group of a row has its own grid, and no group is left over",
    SHIPPED,
    (*REFUSED, f"{GIVEN}.quantize_weight"),
)


@quantize_weight.invariant("the shape of the scales: whole matrix, rows, groups")
def _(answer) -> None:
    weight = randn(6, 128)
    for group_size, grids in ((0, (1, 1)), (-1, (6, 1)), (64, (6, 2)), (128, (6, 1)), (16, (6, 8))):
        got = answer(weight, 4, group_size)
        if isinstance(got, tuple) and len(got) == 3 and getattr(got[1], "dtype", None) == torch.uint8:
            require(got[2].dtype == torch.uint8, "scales and zeros stand in each other's place: (codes, scales, zeros)")
        triple_of(got, (6, 128), grids)


@quantize_weight.invariant("every number meets the scale of its own group, at both sides of a border", share=2)
def _(answer) -> None:
    for group_size in (0, -1, 32, 16):
        weight = randn(5, 96, seed=3) * torch.logspace(-2, 1, 96)
        weight[:, ::32] *= 7  # the first of a group is the loudest of it
        groups = grouped(weight, group_size)
        codes, scales, zeros = triple_of(answer(weight, 4, group_size), (5, 96), tuple(groups.shape[:2]))
        look_at = f"groups of {group_size}: which numbers share a scale, and does the border belong to the next group?"
        same_grid(scales, zeros, grid_of(groups, 4), look_at)
        nearest_codes(codes.reshape(groups.shape), groups, scales, zeros, 4, look_at)


@quantize_weight.invariant("bits and symmetry are passed on")
def _(answer) -> None:
    weight = randn(3, 64, seed=4)
    for bits, symmetric in ((3, False), (8, False), (4, True), (2, True)):
        groups = grouped(weight, 32)
        codes, scales, zeros = triple_of(answer(weight, bits, 32, symmetric), (3, 64), (3, 2))
        look_at = f"{bits} bits, {'symmetric' if symmetric else 'asymmetric'}, groups of 32"
        same_grid(scales, zeros, grid_of(groups, bits, symmetric), look_at)
        nearest_codes(codes.reshape(groups.shape), groups, scales, zeros, bits, look_at)


@quantize_weight.invariant("a group size that does not divide the row is refused, with both numbers")
def _(answer) -> None:
    refused(lambda: answer(randn(4, 96), 4, 64), ("64", "96"), "groups of 64 in a row of 96")
    refused(lambda: answer(randn(4, 96), 4, 97), ("97", "96"), "groups of 97 in a row of 96")
    refused(lambda: answer(randn(10, 24), 4, 16), ("16", "24"), "groups of 16 in 10 rows of 24, which hold 240")


QUESTIONS = [affine_quantize, quantize_weight]
