"""What the checks of this lab share: random weights, an oracle in fp64, and what to say about codes, scales, zeros."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit.checks.contract import Failed, require

LAB = "lab3_int4_quantization"
SHIPPED = ("labkit.quant",)
TIE = 0.501  # steps: a code may be either neighbour of a number half way between two

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def grouped(weight: torch.Tensor, group_size: int) -> torch.Tensor:
    """[rows, groups, group] in fp64; [1, 1, all] for group size 0."""
    if group_size == 0:
        return weight.double().reshape(1, 1, -1)
    return weight.double().reshape(len(weight), -1, weight.shape[1] if group_size < 0 else group_size)


def grid_of(groups: torch.Tensor, bits: int, symmetric: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """(scale, zero) of each row along the last dimension, fp64."""
    top, low, high = 2**bits - 1, groups.amin(-1).clamp(max=0).double(), groups.amax(-1).clamp(min=0).double()
    if symmetric:
        scale = torch.maximum(-low, high) * 2 / top
        return scale, torch.full_like(scale, 2 ** (bits - 1))
    scale = (high - low) / top
    return scale, (-low / scale).round()


def rounded(weight: torch.Tensor, bits: int, group_size: int) -> torch.Tensor:
    """The weight as its asymmetric grid leaves it, fp64."""
    groups = grouped(weight, group_size)
    scale, zero = (t[..., None] for t in grid_of(groups, bits))
    return (((groups / scale).round() + zero).clamp(0, 2**bits - 1) - zero).mul(scale).reshape(weight.shape)


def real(triple: Triple, shape: torch.Size) -> torch.Tensor:
    """What codes, scales and zeros stand for, fp64."""
    codes, scales, zeros = triple
    groups = codes.double().reshape(*scales.shape, -1)
    return ((groups - zeros.double()[..., None]) * scales.double()[..., None]).reshape(shape)


def triple_of(got: object, codes: tuple[int, ...], grids: tuple[int, ...]) -> Triple:
    """`got` as (codes, scales, zeros) of these shapes and of the right dtypes, or Failed."""
    tensors = isinstance(got, tuple) and len(got) == 3 and all(isinstance(t, torch.Tensor) for t in got)
    require(tensors, f"a tuple (codes, scales, zeros) of tensors was expected, not {type(got).__name__}")
    wanted = (("codes", codes, torch.uint8), ("scales", grids, torch.float32), ("zeros", grids, torch.uint8))
    for tensor, (name, shape, dtype) in zip(got, wanted, strict=True):  # type: ignore[call-overload]
        require(tuple(tensor.shape) == shape, f"{name} has shape {tuple(tensor.shape)}, {shape} expected")
        require(tensor.dtype == dtype, f"{name} is {tensor.dtype}, {dtype} expected")
    return got  # type: ignore[return-value]


def same_grid(scale: torch.Tensor, zero: torch.Tensor, want: tuple[torch.Tensor, torch.Tensor], look_at: str) -> None:
    """Scales within rounding of fp32, and the same zeros."""
    close = torch.isclose(scale.double(), want[0], rtol=1e-5, atol=0)
    if not close.all():
        at = tuple((~close).nonzero()[0].tolist())
        raise Failed(f"{look_at}: scale{list(at)} is {scale[at].item():.6g}, {want[0][at].item():.6g} expected")
    wrong = zero.double() != want[1]
    if wrong.any():
        at = tuple(wrong.nonzero()[0].tolist())
        raise Failed(f"{look_at}: zero{list(at)} is {int(zero[at])}, {int(want[1][at])} expected")


def nearest_codes(
    codes: torch.Tensor, groups: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, bits: int, look_at: str
) -> None:
    """Each code is the one nearest to its number; groups: [..., group], codes likewise."""
    exact = (groups.double() / scale.double()[..., None] + zero.double()[..., None]).clamp(0, 2**bits - 1)
    off = (codes.double() - exact).abs()
    if (off > TIE).any():
        at = tuple((off > TIE).nonzero()[0].tolist())
        raise Failed(
            f"{look_at}: the code at {list(at)} is {int(codes[at])}, {exact[at].item():.2f} is where its number lies on"
            f" the grid ({(off > TIE).double().mean():.1%} of the codes are not the nearest)"
        )


def refused(action: Callable[[], object], parts: tuple[str, ...], what: str) -> None:
    """Require a ValueError whose text has all of `parts` in it."""
    try:
        got = action()
    except ValueError as error:
        missing = [part for part in parts if part not in str(error)]
        require(not missing, f"{what}: the ValueError does not name {missing}: {error}")
        return
    raise Failed(
        f"{what} must raise ValueError, but "
        + ("gave None" if got is None else f"was accepted, and gave a {type(got).__name__}")
    )
