"""The arithmetic behind lab 3's illusions: the least time of a product by format, axes of scales, FP8 and its range."""

from __future__ import annotations

import torch

BANDWIDTH, FLOPS = 4.3e12, 790e12  # bytes and bf16 FLOPs a second, as measured on an NVIDIA H200
FORMATS = {  # bytes a weight, and the rate of its products: int4 is multiplied in 16 bits, FP8 taken for twice as fast
    "bf16": (2.0, FLOPS),
    "fp8": (1.0, 2 * FLOPS),
    "int4, groups of 128": (0.5 + 2.5 / 128, FLOPS),
}


def floor_us(m: int, fmt: str, n: int = 8192, k: int = 8192) -> float:
    """Least time of [m, k] @ [k, n], microseconds: of its bytes or of its FLOPs, whichever takes longer."""
    weight_bytes, rate = FORMATS[fmt]
    return 1e6 * max((weight_bytes * n * k + 2 * m * (n + k)) / BANDWIDTH, 2 * m * n * k / rate)


def product_error(per_token: bool, per_channel: bool) -> float:
    """Mean relative error of the rows of an 8-bit product with one loud token and one loud output channel."""
    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(64, 256, generator=g), torch.randn(128, 256, generator=g)
    x[5] *= 50
    w[7] *= 50

    def rounded(t: torch.Tensor, rows: bool) -> torch.Tensor:
        scale = (t.abs().amax(1, keepdim=True) if rows else t.abs().max()) / 127
        return (t / scale).round() * scale

    y, got = x @ w.T, rounded(x, per_token) @ rounded(w, per_channel).T
    return ((got - y).norm(dim=1) / y.norm(dim=1)).mean().item()


def fp8_error(x: torch.Tensor, scaled: bool) -> float:
    """Relative error of a cast to E4M3; what is beyond its range saturates at 448, as a GPU's conversion does."""
    scale = x.abs().max() / 448 if scaled else torch.tensor(1.0)
    cast = (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale
    return ((cast - x).norm() / x.norm()).item()
