"""Blocks as GGUF files have them, for comparison: Q4_0, and Q4_K with scales that are quantized themselves.

A block lies along a row, as a group does. Q4_0: 32 weights, one fp16 scale, 8 the zero: 4.5 bits a weight. Q4_K: 256
weights in 8 sub-blocks of 32, each with a scale and a minimum of 6 bits, and two fp16 for all eight: 4.5 bits a weight
too. The rules are those of llama.cpp (ggml-quants.c), without its importance matrix.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

BLOCK = 32
SUPER_BLOCK = 256
STEPS = 20  # widths that are tried for a sub-block


@dataclass(frozen=True)
class Q4_0:
    """codes: uint8 [rows, blocks, 32], from 0 to 15. scales: fp16 [rows, blocks]. real = (code - 8) * scale."""

    codes: torch.Tensor
    scales: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """fp32 [rows, columns]."""
        return ((self.codes.float() - 8) * self.scales.float()[..., None]).flatten(1)

    def to_bytes(self) -> torch.Tensor:
        """uint8 [rows, 18 * blocks], as in a GGUF file: the scale, then codes 0 to 15 low and 16 to 31 high."""
        nibbles = self.codes[..., :16] | self.codes[..., 16:] << 4
        return torch.cat([_halves(self.scales), nibbles], -1).flatten(1)


@dataclass(frozen=True)
class Q4_K:
    """real = scale * sub_scale * code - least * sub_least.

    codes: uint8 [rows, supers, subs, 32], 0 to 15. sub_scales, sub_leasts: uint8 [rows, supers, subs], 0 to 63. scales,
    leasts: fp16 [rows, supers].
    """

    codes: torch.Tensor
    sub_scales: torch.Tensor
    sub_leasts: torch.Tensor
    scales: torch.Tensor
    leasts: torch.Tensor

    def dequantize(self) -> torch.Tensor:
        """fp32 [rows, columns]."""
        scale = self.scales.float()[..., None] * self.sub_scales.float()
        least = self.leasts.float()[..., None] * self.sub_leasts.float()
        return (scale[..., None] * self.codes.float() - least[..., None]).flatten(1)

    def to_bytes(self) -> torch.Tensor:
        """uint8 [rows, 144 * supers], as in a GGUF file. ValueError unless super-blocks are of 256."""
        if self.codes.shape[2] != SUPER_BLOCK // BLOCK:
            raise ValueError(f"GGUF has 8 sub-blocks to a super-block, and here are {self.codes.shape[2]}")
        s, m = self.sub_scales, self.sub_leasts
        # The first four keep 6 bits to a byte; the two bits that leaves are the high ones of the last four.
        packed = [s[..., :4] | s[..., 4:] >> 4 << 6, m[..., :4] | m[..., 4:] >> 4 << 6]
        packed.append(s[..., 4:] & 15 | (m[..., 4:] & 15) << 4)
        nibbles = (self.codes[..., 0::2, :] | self.codes[..., 1::2, :] << 4).flatten(2)
        return torch.cat([_halves(self.scales), _halves(self.leasts), *packed, nibbles], -1).flatten(1)


def _halves(values: torch.Tensor) -> torch.Tensor:
    """The two bytes of each fp16 number, in a last dimension of their own."""
    return values.contiguous().view(torch.uint8).reshape(*values.shape, 2)


def quantize_q4_0(weight: torch.Tensor) -> Q4_0:
    """Symmetric blocks whose scale puts the number of largest magnitude at code 0, the end that reaches further.

    weight: [rows, columns]. ValueError unless 32 divides the columns and all numbers are finite.
    """
    blocks = _blocks(weight, BLOCK, "32")
    largest = blocks.gather(-1, blocks.abs().argmax(-1, keepdim=True))
    scales = largest / -8
    inverse = torch.where(scales == 0, 0.0, 1 / scales)
    codes = torch.trunc(blocks * inverse + 8.5).clamp(0, 15).to(torch.uint8)
    return Q4_0(codes, scales[..., 0].half())


def quantize_q4_k(weight: torch.Tensor, super_block: int = SUPER_BLOCK) -> Q4_K:
    """Asymmetric sub-blocks of 32: a fit of scale and minimum to each, then both rounded to 6 bits.

    weight: [rows, columns]. super_block: weights that share the two fp16; GGUF has 256, which models of other widths
    than its multiples cannot use. ValueError unless 32 divides super_block and that the columns.
    """
    if super_block % BLOCK or super_block < BLOCK:
        raise ValueError(f"super_block must be a multiple of {BLOCK}, and is {super_block}")
    blocks = _blocks(weight, super_block, f"super_block {super_block}").unflatten(-1, (-1, BLOCK))
    fit_scale, fit_least = _fit(blocks)
    scales, leasts = (fit.amax(-1) / 63 for fit in (fit_scale, fit_least))
    sub_scales, sub_leasts = (
        torch.where(whole[..., None] > 0, (fit / whole[..., None]).round(), 0.0).clamp(0, 63)
        for fit, whole in ((fit_scale, scales), (fit_least, leasts))
    )
    scales, leasts = scales.half(), leasts.half()
    scale, least = scales.float()[..., None] * sub_scales, leasts.float()[..., None] * sub_leasts
    steps = torch.where(scale[..., None] > 0, (blocks + least[..., None]) / scale[..., None], 0.0)
    codes = steps.round().clamp(0, 15).to(torch.uint8)
    return Q4_K(codes, sub_scales.to(torch.uint8), sub_leasts.to(torch.uint8), scales, leasts)


def _blocks(weight: torch.Tensor, size: int, name: str) -> torch.Tensor:
    if weight.dim() != 2 or weight.shape[1] % size:
        raise ValueError(f"{name} does not divide the columns of weight, {list(weight.shape)}")
    if not bool(torch.isfinite(weight).all()):
        raise ValueError("weight holds numbers that are not finite")
    return weight.float().unflatten(1, (-1, size))


def _fit(blocks: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and -minimum, both at least 0, of each block [..., 32]: of the widths tried, those with the least error.

    For each width, the codes that it gives, and then the line through them by least squares; larger weights count more.
    """
    importance = blocks.square().mean(-1, keepdim=True).sqrt() + blocks.abs()
    low, high = blocks.amin(-1, keepdim=True).clamp(max=0), blocks.amax(-1, keepdim=True)
    span = (high - low).clamp(min=torch.finfo(torch.float32).tiny)
    total, of_x = importance.sum(-1), (importance * blocks).sum(-1)
    best_scale, best_least = (span / 15)[..., 0], -low[..., 0]
    best = torch.full_like(best_scale, torch.inf)
    for step in range(-1, STEPS + 1):
        # The first try is the plain range; the others are of 14 to 16 steps and the numbers as far apart.
        width = 15 if step < 0 else 14 + 0.1 * step
        codes = ((blocks - low) * (width / span)).round().clamp(0, 15)
        of_code, of_square = (importance * codes).sum(-1), (importance * codes * codes).sum(-1)
        of_both = (importance * codes * blocks).sum(-1)
        determinant = total * of_square - of_code * of_code
        scale = (total * of_both - of_x * of_code) / determinant
        least = -(of_square * of_x - of_code * of_both) / determinant
        above = least < 0  # the minimum may not be above 0: then the line goes through it
        scale = torch.where(above, of_both / of_square, scale)
        least = torch.where(above, 0.0, least)
        error = (importance * (scale[..., None] * codes - least[..., None] - blocks).square()).sum(-1)
        better = (error < best) & torch.isfinite(scale) & (scale >= 0)  # all alike: no line
        best = torch.where(better, error, best)
        best_scale, best_least = torch.where(better, scale, best_scale), torch.where(better, least, best_least)
    return best_scale, best_least
