"""Correct versions of what the first questions of lab 3 build, for the answers of later ones.

With these a slip in an early answer costs that answer alone. The early answers themselves may not use them.
"""

from __future__ import annotations

import torch

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def affine_quantize(x: torch.Tensor, bits: int, symmetric: bool = False) -> Triple:
    """(codes, scale, zero) of x, with one grid for each row along the last dimension.

    x: float [..., n]. codes: uint8 [..., n]. scale: fp32 [...], positive. zero: uint8 [...].
    """
    x = x.float()
    top = 2**bits - 1
    if symmetric:
        scale = (2 * x.abs().amax(-1) / top).clamp(min=1e-12)
        zero = torch.full_like(scale, 2 ** (bits - 1))
    else:
        low, high = x.amin(-1).clamp(max=0), x.amax(-1).clamp(min=0)
        scale = ((high - low) / top).clamp(min=1e-12)
        zero = (-low / scale).round().clamp(0, top)
    codes = ((x / scale.unsqueeze(-1)).round() + zero.unsqueeze(-1)).clamp(0, top)
    return codes.to(torch.uint8), scale, zero.to(torch.uint8)


def quantize_weight(weight: torch.Tensor, bits: int, group_size: int, symmetric: bool = False) -> Triple:
    """(codes, scales, zeros) of a matrix [rows, n], with one grid for each group_size neighbours of a row.

    group_size: -1 for whole rows, 0 for the whole matrix. codes: uint8 [rows, n]. scales: fp32 [rows, groups], zeros:
    uint8 likewise; [1, 1] for the whole matrix. ValueError for a group size that does not divide n.
    """
    rows, n = weight.shape
    if group_size > 0 and n % group_size:
        raise ValueError(f"group_size {group_size} does not divide the {n} inputs")
    shape = (1, 1, rows * n) if group_size == 0 else (rows, -1, n if group_size == -1 else group_size)
    codes, scales, zeros = affine_quantize(weight.reshape(shape), bits, symmetric)
    return codes.reshape(weight.shape), scales, zeros
