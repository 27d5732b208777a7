"""Affine quantization: numbers on a grid of 2^bits steps, real = (code - zero) * scale.

One scale and one zero serve a whole tensor, an output channel (a row), or a group of inputs within a row. Weights are
[out_features, in_features]; groups run along the inputs, as each output sums over them. Codes are unsigned. The
rule for scale and zero is that of torch.ao's MinMaxObserver: the range always holds 0, so that 0 is on the grid;
symmetric grids are as wide on both sides of their middle code and reach from -2^(bits-1) to 2^(bits-1) - 1 steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

PER_TENSOR, PER_CHANNEL = 0, -1  # values of group_size; -1 is also what checkpoints write for it


@dataclass(frozen=True)
class Scheme:
    """What grid to use. group_size: inputs that share a scale, or PER_CHANNEL, or PER_TENSOR.

    symmetric: zero is the middle code, 2^(bits - 1). scale_dtype: what scales are rounded to before codes are chosen;
    a checkpoint that stores fp16 scales wants codes that fit those.
    """

    bits: int = 4
    group_size: int = PER_CHANNEL
    symmetric: bool = False
    scale_dtype: torch.dtype = torch.float32

    def __post_init__(self) -> None:
        if not 2 <= self.bits <= 8:
            raise ValueError(f"bits must be from 2 to 8, and is {self.bits}")
        if self.group_size < PER_CHANNEL:
            raise ValueError(f"group_size must be positive, PER_CHANNEL (-1) or PER_TENSOR (0), not {self.group_size}")
        if self.scale_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(f"scale_dtype must be float32, float16 or bfloat16, and is {self.scale_dtype}")

    @property
    def top(self) -> int:
        """The highest code."""
        return 2**self.bits - 1

    def grouped(self, weight: torch.Tensor, name: str = "weight") -> torch.Tensor:
        """`weight` with the numbers that share a scale along the last dimension: [rows, groups, group].

        ValueError, which calls the weight `name`, for one that is not a matrix or whose rows do not fall into groups.
        """
        if weight.dim() != 2 or not weight.numel():
            raise ValueError(f"{name} must be a matrix [out_features, in_features], and has shape {list(weight.shape)}")
        if self.group_size == PER_TENSOR:
            return weight.reshape(1, 1, -1)
        if self.group_size == PER_CHANNEL:
            return weight.unsqueeze(1)
        width = weight.shape[1]
        if width % self.group_size:
            raise ValueError(
                f"group_size {self.group_size} does not divide the {width} inputs of {name}: a last group of "
                f"{width % self.group_size} would be left, which packed formats and kernels do not have. "
                f"Choose a divisor of {width}, such as {_divisor(width)}, or PER_CHANNEL"
            )
        return weight.reshape(weight.shape[0], -1, self.group_size)


def _divisor(width: int) -> int:
    return next(size for size in (128, 64, 32, 16, 8, 4, 2, 1) if width % size == 0)


@dataclass(frozen=True)
class Quantized:
    """A quantized matrix. codes: uint8, of the matrix's shape. scales, zeros: [rows, groups], zeros uint8."""

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    scheme: Scheme

    def dequantize(self) -> torch.Tensor:
        """(codes - zeros) * scales, fp32, of the matrix's shape."""
        codes = self.scheme.grouped(self.codes)
        steps = codes.float() - self.zeros.float()[..., None]
        return (steps * self.scales.float()[..., None]).reshape(self.codes.shape)


def range_of(groups: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Lowest and highest number along the last dimension."""
    return groups.amin(-1), groups.amax(-1)


def grid_of(low: torch.Tensor, high: torch.Tensor, scheme: Scheme) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales and zeros (uint8) of the grids that cover `low` to `high`, each of their shape."""
    if low.shape != high.shape or not bool((low <= high).all()):
        raise ValueError("low must be of high's shape, and nowhere above it")
    low, high = low.float().clamp(max=0), high.float().clamp(min=0)
    scales = torch.maximum(-low, high) / (scheme.top / 2) if scheme.symmetric else (high - low) / scheme.top
    scales = scales.clamp(min=torch.finfo(torch.float32).eps)  # a group of zeros needs a scale that can divide
    scales = scales.to(scheme.scale_dtype)
    if scheme.symmetric:
        return scales, torch.full_like(scales, 2 ** (scheme.bits - 1), dtype=torch.uint8)
    zeros = -torch.round(low / scales.float())
    return scales, zeros.clamp(0, scheme.top).to(torch.uint8)


def encode(groups: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """Codes of numbers [..., group] on the grids [...]: the nearest step, ties to the even one, cut off at the ends."""
    steps = torch.round(groups.float() / scales.float()[..., None])
    return (steps + zeros.float()[..., None]).clamp(0, scheme.top).to(torch.uint8)


def quantize(weight: torch.Tensor, scheme: Scheme, *, name: str = "weight") -> Quantized:
    """Round to nearest (RTN): each group's grid covers its own range.

    weight: [out_features, in_features], of any float dtype. ValueError, which calls the weight `name`, for another
    shape, a group size that does not divide in_features, or numbers that are not finite.
    """
    groups = scheme.grouped(weight, name)
    if not bool(torch.isfinite(weight).all()):
        raise ValueError(f"{name} holds numbers that are not finite")
    scales, zeros = grid_of(*range_of(groups), scheme)
    return Quantized(encode(groups, scales, zeros, scheme).reshape(weight.shape), scales, zeros, scheme)


def round_trip(weight: torch.Tensor, scheme: Scheme) -> torch.Tensor:
    """`weight` as it is after quantization: on its grid, in fp32."""
    return quantize(weight, scheme).dequantize()
