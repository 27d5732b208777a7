"""Hidden checks of lab 3: calibration text, AWQ, GPTQ.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from labkit.quant import Scheme, gptq_weight, output_error, round_trip

LAB = "lab3_int4_quantization"


def draw(tokens: list, evaluation: list, count: int, length: int, ngram: int, seed: int) -> list:
    """Driver: calibration_windows; the error's text if it raises ValueError."""
    import torch

    try:
        return calibration_windows(torch.tensor(tokens), torch.tensor(evaluation), count, length, ngram, seed).tolist()
    except ValueError as error:
        return [str(error)]


@hidden_check(LAB, "calibration_windows")
def leaky_texts(remote: Remote) -> None:
    rng = np.random.default_rng(51)
    for length, ngram, leaks in ((16, 4, 5), (11, 11, 3), (30, 7, 9)):
        evaluation = rng.integers(0, 10**6, 300)
        tokens = rng.integers(10**6, 2 * 10**6, 20 * length + 3)
        dirty = rng.choice(20, leaks, replace=False)
        for window in dirty:
            at, run = window * length + rng.integers(0, length - ngram + 1), rng.integers(0, 300 - ngram + 1)
            tokens[at : at + ngram] = evaluation[run : run + ngram]
        windows = tokens[: 20 * length].reshape(20, length).tolist()
        fit = [tuple(w) for i, w in enumerate(windows) if i not in dirty]
        arguments = (tokens.tolist(), evaluation.tolist(), len(fit), length, ngram, 3)
        got = remote.call(draw, *arguments)
        require(
            sorted(map(tuple, got)) == sorted(fit), f"{leaks} of 20 windows leak: not exactly the others were drawn"
        )
        got = remote.call(draw, *arguments[:2], len(fit) + 1, length, ngram, 3)
        require(isinstance(got[0], str) and str(len(fit)) in got[0], f"one window too many was asked for: {got[0]}")


def fold(gain: np.ndarray, weights: np.ndarray, inputs: np.ndarray, bits: int, group_size: int) -> tuple:
    """Driver: fold_awq of one gain and two matrices; gives scales and everything as it is after."""
    import torch

    before, x = torch.from_numpy(gain.copy()), torch.from_numpy(inputs)
    both = [torch.from_numpy(w.copy()) for w in weights]
    scales = fold_awq(before, both, x, bits, group_size)
    return scales, before, torch.stack(both)


@hidden_check(LAB, "fold_awq")
def random_sites(remote: Remote) -> None:
    for seed, bits, size in ((61, 4, -1), (62, 3, 24), (63, 4, 48)):
        rng = np.random.default_rng(seed)
        gain, weights, inputs = (
            a.astype(np.float32)
            for a in (
                rng.uniform(0.5, 2, 96),
                rng.normal(size=(2, 20, 96)),
                rng.normal(size=(80, 96)) * np.exp(rng.normal(0, 1.5, 96)),
            )
        )
        scales, before, after = remote.call(fold, gain, weights, inputs, bits, size)
        require(np.allclose(after, weights * scales, rtol=1e-3), "weights are not multiplied by the scales")
        require(np.allclose(before, gain / scales, rtol=1e-3), "what is before is not divided by the scales")
        x, w, scheme = torch.from_numpy(inputs), torch.from_numpy(weights.reshape(40, 96)), Scheme(bits, size)
        hessian = x.T @ x / len(x)

        def lost(s: torch.Tensor, w=w, scheme=scheme, hessian=hessian) -> float:
            return output_error(round_trip(w * s, scheme) / s - w, hessian)

        loud = x.abs().mean(0).clamp(min=1e-4)
        tried = [(loud**a) / ((loud**a).max() * (loud**a).min()).sqrt() for a in np.arange(20) * 0.05]
        least, mine = min(map(lost, tried)), lost(torch.from_numpy(scales))
        require(mine <= 1.003 * least, f"{bits} bits, groups of {size}: {mine / least:.3f} times the least error")


@hidden_check(LAB, "fold_awq")
def nothing_to_gain(remote: Remote) -> None:
    rng = np.random.default_rng(64)
    weights, gain = rng.normal(size=(2, 8, 32)).astype(np.float32), np.ones(32, np.float32)
    inputs = np.sign(rng.normal(size=(40, 32))).astype(np.float32)
    scales, before, after = remote.call(fold, gain, weights, inputs, 4, 16)
    require(np.allclose(scales, 1), "all channels are as loud as each other, and the scales are not 1")
    require(np.allclose(after, weights) and np.allclose(before, 1), "a scale of 1 changed something")


def columns(weight: np.ndarray, hessian: np.ndarray, bits: int, group_size: int) -> tuple:
    """Driver: gptq."""
    import torch

    return gptq(torch.from_numpy(weight), torch.from_numpy(hessian), bits, group_size)


@hidden_check(LAB, "gptq")
def random_layers(remote: Remote) -> None:
    for seed, bits, size in ((71, 4, -1), (72, 3, 24), (73, 2, 48)):
        rng = np.random.default_rng(seed)
        x = rng.normal(size=(200, 12)) @ rng.normal(size=(12, 96)) + 0.4 * rng.normal(size=(200, 96))
        weight, hessian = rng.normal(size=(16, 96)).astype(np.float32), (x.T @ x / 200).astype(np.float32)
        codes, scales, zeros = remote.call(columns, weight, hessian, bits, size)
        w, h, scheme = torch.from_numpy(weight), torch.from_numpy(hessian), Scheme(bits, size)
        ours = gptq_weight(w, h, scheme, by_loudness=False)
        require(codes.shape == weight.shape and codes.max() < 2**bits, f"codes of shape {codes.shape}")
        require(np.allclose(scales, ours.scales.numpy(), rtol=1e-5), "other scales than before")
        require(np.array_equal(zeros, ours.zeros.numpy()), "other zeros than before")
        groups = codes.reshape(*scales.shape, -1).astype(np.float32) - zeros.astype(np.float32)[..., None]
        kept = torch.from_numpy((groups * scales[..., None]).reshape(weight.shape))
        mine, best = output_error(kept - w, h), output_error(ours.dequantize() - w, h)
        require(mine <= 1.05 * best, f"{bits} bits, groups of {size}: {mine / best:.2f} times GPTQ's output error")


@hidden_check(LAB, "gptq")
def few_inputs(remote: Remote) -> None:
    rng = np.random.default_rng(74)
    x, weight = rng.normal(size=(6, 48)), rng.normal(size=(5, 48)).astype(np.float32)
    hessian = (x.T @ x / 6).astype(np.float32)
    codes, _, _ = remote.call(columns, weight, hessian, 4, 24)
    require(codes.shape == weight.shape and codes.max() < 16, "a singular hessian")
