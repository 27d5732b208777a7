"""Hidden checks of lab 3: grids, observers, clamps.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from labkit import quant
from labkit.checks.lab3_int4_quantization.cases import grouped, nearest_codes
from labkit.quant import Scheme, clamp_sigmas, quantize, round_trip

LAB = "lab3_int4_quantization"


def weights(seed: int, rows: int, n: int) -> np.ndarray:
    """Rows with outliers and different means."""
    rng = np.random.default_rng(seed)
    made = rng.standard_t(4, (rows, n)) * rng.uniform(0.01, 2, (rows, 1)) + rng.uniform(-0.3, 0.3, (rows, 1))
    return made.astype(np.float32)


def as_rows(x: np.ndarray, bits: int, symmetric: bool) -> tuple:
    """Driver: affine_quantize."""
    import torch

    return affine_quantize(torch.from_numpy(x), bits, symmetric)


def as_weight(x: np.ndarray, bits: int, group_size: int, symmetric: bool) -> tuple:
    """Driver: quantize_weight."""
    import torch

    return quantize_weight(torch.from_numpy(x), bits, group_size, symmetric)


def as_clamped(x: np.ndarray, bits: int, group_size: int, sigmas: float) -> tuple:
    """Driver: quantize_clamped."""
    import torch

    return quantize_clamped(torch.from_numpy(x), bits, group_size, sigmas)


def same(got: tuple, weight: np.ndarray, scheme: Scheme, what: str) -> None:
    """The scales and zeros of labkit.quant, and the nearest codes; half way between two, either.

    The largest number of a symmetric group always lies half way between two steps: fp32 and fp64 may differ there.
    """
    want = quantize(torch.from_numpy(weight), scheme)
    codes, scales, zeros = got
    require(scales.size == want.scales.numel(), f"{what}: scales of shape {scales.shape}")
    close = np.allclose(scales.ravel(), want.scales.numpy().ravel(), rtol=1e-5)
    require(close, f"{what}: other scales")
    require(np.array_equal(zeros.ravel(), want.zeros.numpy().ravel()), f"{what}: other zeros")
    groups = grouped(torch.from_numpy(weight), scheme.group_size)
    require(codes.size == groups.numel(), f"{what}: codes of shape {codes.shape}")
    nearest_codes(
        torch.from_numpy(codes.copy()).reshape(groups.shape), groups, want.scales.reshape(groups.shape[:2]),
        want.zeros.reshape(groups.shape[:2]), scheme.bits, what,
    )  # fmt: skip


@hidden_check(LAB, "affine_quantize")
def random_rows(remote: Remote) -> None:
    for seed, bits, symmetric in ((1, 4, False), (2, 5, True), (3, 8, False), (4, 2, True), (5, 6, False)):
        x = weights(seed, 9, 77)
        x[3], x[4] = np.abs(x[3]) + 1, -np.abs(x[4]) - 1
        got = remote.call(as_rows, x, bits, symmetric)
        same(got, x, Scheme(bits, symmetric=symmetric), f"{bits} bits, symmetric {symmetric}")


def observe(batches: list, per_channel: bool, bits: int, symmetric: bool) -> tuple:
    """Driver: a MinMaxObserver on batches; its scale and zero."""
    import torch

    observer = MinMaxObserver(per_channel)
    for batch in batches:
        observer.observe(torch.tensor(batch))
    scale, zero = observer.grid(bits, symmetric)
    return scale.reshape(-1), zero.reshape(-1)


@hidden_check(LAB, "min_max_observer")
def random_batches(remote: Remote) -> None:
    for seed, per_channel, bits, symmetric in ((11, False, 4, False), (12, True, 4, False), (13, True, 8, True)):
        batches = [weights(seed + i, 5, 8) * loud for i, loud in enumerate((1, 0.2, 4, 0.5))]
        ours = quant.MinMaxObserver(Scheme(bits, -1 if per_channel else 0, symmetric))
        for batch in batches:
            ours.observe(torch.from_numpy(batch))
        scale, zero = (t.numpy().ravel() for t in ours.grid())
        got = remote.call(observe, [b.tolist() for b in batches], per_channel, bits, symmetric)
        what = f"per channel {per_channel}, {bits} bits"
        require(got[0].shape == scale.shape and np.allclose(got[0], scale, rtol=1e-5), f"{what}: other scales")
        require(np.array_equal(got[1], zero), f"{what}: other zeros")


@hidden_check(LAB, "quantize_weight")
def random_groups(remote: Remote) -> None:
    for seed, bits, size, symmetric in ((21, 4, 48, False), (22, 3, -1, False), (23, 4, 0, True), (24, 8, 24, True)):
        weight = weights(seed, 7, 144)
        got = remote.call(as_weight, weight, bits, size, symmetric)
        same(got, weight, Scheme(bits, size, symmetric), f"{bits} bits, groups of {size}")


@hidden_check(LAB, "quantize_clamped")
def random_clamps(remote: Remote) -> None:
    for seed, bits, size, sigmas in ((31, 4, -1, 3.0), (32, 4, 36, 2.2), (33, 3, 72, 1.4)):
        weight, scheme = weights(seed, 6, 144), Scheme(bits, size)
        got = remote.call(as_clamped, weight, bits, size, sigmas)
        cut = clamp_sigmas(torch.from_numpy(weight), sigmas, scheme).numpy()
        same(got, cut, scheme, f"cut at {sigmas} sigma in groups of {size}")


def shares(x: np.ndarray, bits: int, group_size: int, importance: np.ndarray) -> object:
    """Driver: search_clip."""
    import torch

    return search_clip(torch.from_numpy(x), bits, group_size, torch.from_numpy(importance))


@hidden_check(LAB, "search_clip")
def random_clips(remote: Remote) -> None:
    for seed, bits, size in ((41, 4, 24), (42, 3, -1), (43, 4, 72)):
        weight, scheme = torch.from_numpy(weights(seed, 8, 144)), Scheme(bits, size)
        importance = np.random.default_rng(seed).exponential(1, 144).astype(np.float32) ** 3
        share = remote.call(shares, weight.numpy(), bits, size, importance)
        groups = scheme.grouped(weight)
        require(share.shape == tuple(groups.shape[:2]), f"shares of shape {share.shape}")
        bound = torch.from_numpy(share.astype(np.float32))[..., None] * groups.abs().amax(-1, keepdim=True)
        mine = round_trip(groups.clamp(-bound, bound).reshape(weight.shape), scheme)
        theirs = round_trip(
            quant.search_clip(weight, scheme, torch.diag(torch.from_numpy(importance)), steps=10), scheme
        )
        errors = [((kept - weight).square() @ torch.from_numpy(importance)).sum().item() for kept in (mine, theirs)]
        require(share.min() > 0.5 - 1e-4, f"a share of {share.min():.2f}, below all candidates")
        require(errors[0] <= 1.003 * errors[1], f"{bits} bits: {errors[0] / errors[1]:.3f} times the least error")
