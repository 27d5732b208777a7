"""The W4A16 kernel: words read once and unpacked on chip, sums in fp32."""

from __future__ import annotations

import torch

from labkit import device
from labkit.checks import traffic
from labkit.checks.contract import Question
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED, awq_tensors, packed
from labkit.checks.values import close, run_kernel

w4a16 = Question("w4a16", LAB, "packed weights are read once, unpacked on chip, and summed in fp32", SHIPPED,
                 refused=traffic.TORCH_MATH, launches_kernels=True)  # fmt: skip


def activations(m: int, k: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Random rows of a wider tensor, so that they are strided and have garbage between them."""
    g = torch.Generator().manual_seed(seed)
    wide = torch.full((m, k + 8), 40.0)
    wide[:, :k] = torch.randn(m, k, generator=g)
    return wide.to(dtype).to(device.name())[:, :k]


def product(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """x @ weight on the CPU: the oracle in fp64; for less, weights rounded to the dtype and sums in fp32."""
    host = x.cpu()
    if dtype == torch.float64:
        return host.double() @ weight
    return (host.float() @ weight.to(dtype).float()).to(dtype)


def _agrees(answer, shape: tuple[int, int, int, int], dtype: torch.dtype, look_at: str) -> float:
    m, n, k, group = shape
    *tensors, weight = awq_tensors(k, n, group, seed=m + n + k)
    x = activations(m, k, dtype, seed=m)
    got = run_kernel(answer, x, *tensors)
    what = f"{m} rows, [{k}, {n}] in groups of {group}, {str(dtype).removeprefix('torch.')}: {look_at}"
    return close(got, product(x, weight, torch.float64), product(x, weight, dtype), what, "y")


@w4a16.invariant("each word is read once, inside its tensor", share=2, stops=True)
def _(answer) -> None:
    m, n, k, group = 3, 136, 128, 64  # three tiles of columns, the last one of 8
    *tensors, _ = awq_tensors(k, n, group, seed=1)
    count = traffic.stays_inside(answer, activations(m, k, torch.float16, 1), *tensors)
    words, side, rows = k * n // 2, 2 * (n // 2 + 2 * n), 3 * m * k * 2
    what = (
        f"{words:,} of packed weights, {side:,} of scales and zeros, {rows:,} of x: "
        "is each word loaded for its eight columns together?"
    )
    traffic.reads_once(count, words + side + rows, words + side + rows, what)


@w4a16.invariant("one column of each eight, and codes of 8 and more")
def _(answer) -> float:
    k, n = 32, 64
    codes = torch.zeros(k, n, dtype=torch.uint8)
    codes[torch.arange(k), torch.arange(k) % n] = 15  # input i reaches output i alone
    zeros = torch.zeros(1, n, dtype=torch.uint8)
    scales = torch.ones(1, n, dtype=torch.float16)
    tensors = [t.to(device.name()) for t in (packed(codes), packed(zeros), scales)]
    x = activations(2, k, torch.float32, 3)
    look_at = "input i reaches output i alone, by a code of 15: is each nibble unsigned, and in its column?"
    weight = codes.double()
    got = run_kernel(answer, x, *tensors)
    return close(got, product(x, weight, torch.float64), product(x, weight, torch.float32), look_at, "y")


@w4a16.invariant("groups of 32, 64 and 128, each with its own scales and zeros", share=2)
def _(answer) -> float:
    look_at = "is start // GROUP the row of scales and of zeros?"
    shapes = ((4, 64, 128, 32), (1, 72, 192, 64), (17, 64, 256, 128))
    return max(_agrees(answer, shape, torch.float16, look_at) for shape in shapes)


@w4a16.invariant("tails of M, N and K")
def _(answer) -> float:
    look_at = "what a mask hides must add nothing, and code 0 is not weight 0"
    shapes = ((1, 8, 40, 40), (15, 88, 104, 104), (33, 64, 72, 72))
    return max(_agrees(answer, shape, torch.float32, look_at) for shape in shapes)


@w4a16.invariant("partial sums beyond the range of fp16")
def _(answer) -> float:
    k, n = 256, 64
    *tensors, _ = awq_tensors(k, n, 64, seed=9)
    codes, zeros = torch.full((k, n), 15, dtype=torch.uint8), torch.zeros(4, n, dtype=torch.uint8)
    tensors[0], tensors[1] = packed(codes).to(device.name()), packed(zeros).to(device.name())
    tensors[2] = torch.ones(4, n, dtype=torch.float16, device=device.name())
    x = activations(2, k, torch.float16, 4).abs()
    x[:, :64], x[:, 64:128], x[:, 128:192] = 60.0, 60.0, -120.0
    weight = codes.double()
    look_at = "partial sums reach 115,200 and come back: are they kept in fp32?"
    got = run_kernel(answer, x, *tensors)
    return close(got, product(x, weight, torch.float64), product(x, weight, torch.float16), look_at, "y")


QUESTIONS = [w4a16]
