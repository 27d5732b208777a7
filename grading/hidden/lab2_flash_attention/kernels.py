"""Hidden checks of lab 2: the first kernels, the merge, number formats.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import math
import secrets

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from labkit.checks import compare
from labkit.checks.lab2_flash_attention.first_kernels import softmax_peer
from labkit.checks.lab2_flash_attention.numerics import summary

LAB = "lab2_flash_attention"


def on_device(function: str, *arrays: np.ndarray):
    """Driver: call a function of the notebook on tensors; a tuple comes back as a tuple."""
    import torch

    return globals()[function](*(torch.from_numpy(x).to(labkit.device.name()) for x in arrays))


def random(*shape: int, seed: int, dtype: type = np.float32) -> np.ndarray:
    """Normal numbers."""
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def launching(function: str, *arrays: np.ndarray):
    """Driver: the same for an answer that must launch a kernel, and may leave no product or sum to torch."""
    import torch

    from labkit.checks.values import run_kernel

    return run_kernel(globals()[function], *(torch.from_numpy(x).to(labkit.device.name()) for x in arrays))


@hidden_check(LAB, "vector_add")
def odd_lengths(remote: Remote) -> None:
    for n in (3, 511, 512, 769):
        x, y = random(n, seed=n), random(n, seed=n + 1)
        got = remote.call(launching, "vector_add", x, y)
        compare.equal(got, x + y, f"the sum of vectors of {n}")


@hidden_check(LAB, "row_softmax")
def odd_rows(remote: Remote) -> None:
    for cols, factor, shift in ((33, 1.0, 0.0), (129, 200.0, 0.0), (60, 1.0, -500.0)):
        x = torch.from_numpy(random(5, cols, seed=cols) * np.float32(factor) + np.float32(shift))
        got = remote.call(launching, "row_softmax", x.numpy())
        compare.close(got, torch.softmax(x.double(), -1), softmax_peer(x), f"softmax of rows of {cols}")


@hidden_check(LAB, "merge_softmax")
def random_merges(remote: Remote) -> None:
    for seed, cut in ((1, 5), (2, 30), (3, 0), (4, 50)):
        scores, values = torch.from_numpy(random(6, 50, seed=seed) * 8), torch.from_numpy(random(50, 4, seed=seed + 9))
        parts = (*summary(scores[:, :cut], values[:cut]), *summary(scores[:, cut:], values[cut:]))
        got = remote.call(on_device, "merge_softmax", *(p.numpy() for p in parts))
        exact, peer = summary(scores.double(), values.double()), summary(scores, values)
        for name, g, e, p in zip("mlo", got, exact, peer, strict=True):
            compare.close(g, e, p, f"{name} of {cut} and {50 - cut} columns")
    none = [x.numpy() for x in summary(torch.zeros(3, 0), torch.zeros(0, 2))]
    m, total, o = remote.call(on_device, "merge_softmax", *none, *none)
    empty = bool((m == -math.inf).all() and (total == 0).all() and (o == 0).all())
    require(empty and o.shape == (3, 2), "two empty pieces are not empty together")


def stalls() -> list[int]:
    """Driver: the stall point of each format."""
    import torch

    return [int(stall_point(d)) for d in (torch.bfloat16, torch.float32, torch.float16, torch.float64)]


def stall_rounded(bits: int) -> int:
    """Driver: the stall point of fp32 whose results are rounded."""
    import torch

    from labkit.checks.rounded import Rounded

    with Rounded(torch.float32, bits):
        return int(stall_point(torch.float32))


@hidden_check(LAB, "stall_point")
def every_format(remote: Remote) -> None:
    bits = secrets.choice(range(9, 15))
    rounded = remote.call(stall_rounded, bits)
    require(rounded == 2**bits, f"stall point of fp32 rounded to {bits} bits: {rounded}, so it is not found by adding")
    got = remote.call(stalls)
    require(got == [256, 2**24, 2048, 2**53], f"stall points of bf16, fp32, fp16, fp64: {got}")


def base2(scores: np.ndarray, scale: float) -> np.ndarray:
    """Driver: softmax_base2."""
    import torch

    return softmax_base2(torch.from_numpy(scores), scale)


@hidden_check(LAB, "softmax_base2")
def scaled_rows(remote: Remote) -> None:
    for seed, factor, scale in ((1, 1.0, 1.0), (2, 5.0, 0.3), (3, 400.0, 0.5)):
        scores = torch.from_numpy(random(3, 4, 40, seed=seed) * np.float32(factor))
        got = torch.from_numpy(remote.call(base2, scores.numpy(), scale))
        want = torch.softmax(scores.double() * scale, -1)
        error = (got.double() - want).abs().max().item()
        require(
            got.shape == want.shape and error < 1e-4,
            f"scores times {factor}, scale {scale}: the largest error is {error:.2g}",
        )
