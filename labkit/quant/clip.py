"""Narrower grids: cut outliers off, so that all other numbers get finer steps.

`clamp_sigmas` cuts where a rule of thumb says so, without a look at what that does. `search_clip` tries widths and
keeps the best one: by the error of the weights, or by the error of the output, for which it needs to know the inputs.
The two objectives differ: a weight that meets large inputs may be worth any loss of precision in all the others.
"""

from __future__ import annotations

import torch

from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, round_trip


def clamp_sigmas(weight: torch.Tensor, sigmas: float, scheme: Scheme | None = None) -> torch.Tensor:
    """`weight` cut at `sigmas` standard deviations from the mean, those of each group that shares a scale.

    scheme: which numbers those are; each row by default. ValueError unless sigmas is positive.
    """
    if not sigmas > 0:
        raise ValueError(f"sigmas must be positive, and is {sigmas}")
    groups = (scheme or Scheme(group_size=PER_CHANNEL)).grouped(weight).float()
    mean, deviation = groups.mean(-1, keepdim=True), groups.std(-1, keepdim=True)
    kept = groups.clamp(mean - sigmas * deviation, mean + sigmas * deviation)
    return kept.reshape(weight.shape).to(weight.dtype)


def output_error(difference: torch.Tensor, hessian: torch.Tensor) -> float:
    """Mean squared change of the output, summed over its features, when weights change by `difference`.

    difference: [out_features, in_features]. hessian: mean of x x^T over the inputs, [in_features, in_features]; with it
    E|D x|^2 = tr(D H D^T), so that inputs need to be seen but once.
    """
    difference = difference.float()
    return torch.sum(difference @ hessian * difference).item()


def search_clip(
    weight: torch.Tensor, scheme: Scheme, hessian: torch.Tensor | None = None, *, steps: int = 10, least: float = 0.5
) -> torch.Tensor:
    """`weight` with each group cut at the share of its largest magnitude that loses least, of `steps` from 1 downwards.

    hessian: mean of x x^T over the inputs of this layer, [in_features, in_features]: the error of the output counts,
    each group's alone, as AWQ counts it. None: the error of the weights. least: the share below which none is tried.
    ValueError names an argument that does not fit.
    """
    if steps < 1 or not 0 < least <= 1:
        raise ValueError(f"steps must be at least 1 and least in (0, 1], and are {steps} and {least}")
    width = weight.shape[-1]
    if hessian is not None and hessian.shape != (width, width):
        raise ValueError(f"hessian must be [{width}, {width}], the inputs of weight, and is {list(hessian.shape)}")
    if hessian is not None and scheme.group_size == PER_TENSOR:
        raise ValueError("scheme.group_size: a clip of the whole tensor is searched by weight error only")
    groups = scheme.grouped(weight).float()
    blocks = None if hessian is None else _blocks(hessian, groups.shape[-1])
    largest = groups.abs().amax(-1, keepdim=True)
    best = torch.full(groups.shape[:-1], torch.inf, device=weight.device)
    bound = largest.clone()
    for step in range(steps):
        limit = largest * (1 - step * (1 - least) / steps)
        cut = groups.clamp(-limit, limit).reshape(weight.shape)
        lost = round_trip(cut, scheme).reshape(groups.shape) - groups
        error = lost.square().sum(-1) if blocks is None else _by_group(lost, blocks)
        better = error < best
        best = torch.where(better, error, best)
        bound = torch.where(better[..., None], limit, bound)
    return groups.clamp(-bound, bound).reshape(weight.shape).to(weight.dtype)


def _blocks(hessian: torch.Tensor, group: int) -> torch.Tensor:
    """The blocks of `group` inputs along the diagonal, [groups, group, group]."""
    starts = range(0, len(hessian), group)
    return torch.stack([hessian[i : i + group, i : i + group] for i in starts])


def _by_group(lost: torch.Tensor, blocks: torch.Tensor) -> torch.Tensor:
    """Output error of each row's group. lost: [rows, groups, group]; gives [rows, groups]."""
    through = torch.bmm(lost.transpose(0, 1), blocks)  # [groups, rows, group]
    return (through * lost.transpose(0, 1)).sum(-1).transpose(0, 1)
