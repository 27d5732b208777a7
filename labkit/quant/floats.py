"""FP8 weights, for comparison: 8 bits that spend some on an exponent, so that small numbers keep their digits.

E4M3 has 3 bits of mantissa and reaches 448, E5M2 has 2 and reaches 57344 (arXiv 2209.05433). A scale brings the largest
magnitude to the end of that range; cast without one, weights of about 0.02 fall among the subnormals of E4M3.
"""

from __future__ import annotations

import torch

from labkit.quant.grid import PER_CHANNEL, Scheme

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def quantize_fp8(
    weight: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, group_size: int = PER_CHANNEL
) -> tuple[torch.Tensor, torch.Tensor]:
    """`weight` [out, in] as (values of `dtype`, of its shape, and fp32 scales [rows, groups]); real = value * scale.

    group_size: as in `Scheme`. ValueError for a dtype that is not FP8, numbers that are not finite, or groups that do
    not fit.
    """
    if dtype not in FP8:
        raise ValueError(f"dtype must be torch.float8_e4m3fn or torch.float8_e5m2, and is {dtype}")
    groups = Scheme(8, group_size).grouped(weight).float()
    if not bool(torch.isfinite(groups).all()):
        raise ValueError("weight holds numbers that are not finite")
    scales = groups.abs().amax(-1) / torch.finfo(dtype).max
    scales = scales.clamp(min=torch.finfo(torch.float32).tiny)  # a group of zeros needs a scale that can divide
    return (groups / scales[..., None]).to(dtype).reshape(weight.shape), scales


def dequantize_fp8(values: torch.Tensor, scales: torch.Tensor, group_size: int = PER_CHANNEL) -> torch.Tensor:
    """What `quantize_fp8` kept, fp32, of the shape of `values`."""
    groups = Scheme(8, group_size).grouped(values.float(), "values")
    return (groups * scales[..., None]).reshape(values.shape)
