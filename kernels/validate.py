"""Argument checks that the kernels' wrappers share. Every message begins with the argument's name."""

from __future__ import annotations

import torch
import triton

FLOATS = (torch.float16, torch.bfloat16, torch.float32)


def require(condition: bool, message: str) -> None:
    """Raise ValueError with `message` unless `condition` holds."""
    if not condition:
        raise ValueError(message)


def require_type(condition: bool, message: str) -> None:
    """Raise TypeError with `message` unless `condition` holds."""
    if not condition:
        raise TypeError(message)


def require_tensors(**tensors: torch.Tensor) -> None:
    """All are tensors on the first one's device, and kernels can run there."""
    first, device = "", torch.device("cpu")
    for name, tensor in tensors.items():
        require_type(isinstance(tensor, torch.Tensor), f"{name}: expected a tensor, got {type(tensor).__name__}")
        if not first:
            first, device = name, tensor.device
        require(tensor.device == device, f"{name}: is on {tensor.device}, but {first} is on {device}")
    require(
        device.type == "cuda" or triton.knobs.runtime.interpret,
        f"{first}: is on {device}; kernels run there only with TRITON_INTERPRET=1 set before they are imported",
    )


def require_ints(dtypes: tuple[torch.dtype, ...], **tensors: torch.Tensor) -> None:
    """All are of one of these integer dtypes."""
    for name, tensor in tensors.items():
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        require_type(tensor.dtype in dtypes, f"{name}: expected {names}, got {tensor.dtype}")


def require_caches(k_cache: torch.Tensor, v_cache: torch.Tensor, dtype: torch.dtype, head_dim: int) -> None:
    """Both are [num_blocks, block_size, num_kv_heads, head_dim] of this dtype, with a contiguous head_dim."""
    for name, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        require(
            cache.ndim == 4 and cache.shape[3] == head_dim,
            f"{name}: expected [num_blocks, block_size, num_kv_heads, {head_dim}], got {list(cache.shape)}",
        )
        require_type(cache.dtype == dtype, f"{name}: expected {dtype}, got {cache.dtype}")
        require(cache.stride(3) == 1, f"{name}: head_dim must be contiguous, its stride is {cache.stride(3)}")
    require(
        v_cache.shape == k_cache.shape, f"v_cache: {list(v_cache.shape)} differs from k_cache {list(k_cache.shape)}"
    )


def tma_strides(x: torch.Tensor) -> list[int]:
    """x's strides; a dimension of size 1 may have any in torch, but TMA checks that one too."""
    fitting = -(-x.numel() // 16) * 16
    return [step if size > 1 else fitting for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True)] + [1]
