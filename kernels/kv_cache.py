"""Writing new tokens' K and V into a paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.validate import FLOATS, require, require_caches, require_ints, require_tensors, require_type


@triton.jit
def _write_kv_kernel(
    k_ptr, v_ptr, k_cache_ptr, v_cache_ptr, slot_ptr, num_kv_heads, stride_kn, stride_kh, stride_vn, stride_vh,
    stride_kcb, stride_kct, stride_kch, stride_vcb, stride_vct, stride_vch,
    HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program = one token. Reads and writes 2 * num_kv_heads * HEAD_DIM elements; nothing if its slot is negative."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    head = tl.arange(0, BLOCK_H)[:, None]
    dim = tl.arange(0, BLOCK_D)[None, :]
    live = (head < num_kv_heads) & (dim < HEAD_DIM)
    k = tl.load(k_ptr + token * stride_kn + head * stride_kh + dim, mask=live)  # (BLOCK_H, BLOCK_D)
    v = tl.load(v_ptr + token * stride_vn + head * stride_vh + dim, mask=live)  # (BLOCK_H, BLOCK_D)
    k_row = k_cache_ptr + block * stride_kcb + offset * stride_kct
    v_row = v_cache_ptr + block * stride_vcb + offset * stride_vct
    tl.store(k_row + head * stride_kch + dim, k, mask=live)
    tl.store(v_row + head * stride_vch + dim, v, mask=live)


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write the K and V of new tokens to their slots of the cache, in place.

    k, v: [num_tokens, num_kv_heads, head_dim] of the cache's dtype, head_dim contiguous.
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim], any strides as long as head_dim is contiguous.
    slot_mapping: [num_tokens] int32 or int64: block * block_size + offset in the block; a negative slot is skipped,
        which is how a batch padded for a CUDA graph marks its padding. Two tokens must not share a slot. Slots are not
        read on the host, so one beyond the cache is not checked.

    Raises TypeError or ValueError, naming the argument, before anything is written.
    """
    require_tensors(k=k, v=v, k_cache=k_cache, v_cache=v_cache, slot_mapping=slot_mapping)
    require(k.ndim == 3, f"k: expected [num_tokens, num_kv_heads, head_dim], got {list(k.shape)}")
    require_type(k.dtype in FLOATS, f"k: expected float16, bfloat16 or float32, got {k.dtype}")
    num_tokens, num_kv_heads, head_dim = k.shape
    require(v.shape == k.shape, f"v: expected {list(k.shape)} like k, got {list(v.shape)}")
    require_type(v.dtype == k.dtype, f"v: expected {k.dtype} like k, got {v.dtype}")
    for name, tensor in (("k", k), ("v", v)):
        require(tensor.stride(2) == 1, f"{name}: head_dim must be contiguous, its stride is {tensor.stride(2)}")
    require_caches(k_cache, v_cache, k.dtype, head_dim)
    require(
        k_cache.shape[2] == num_kv_heads, f"k_cache: expected {num_kv_heads} KV heads like k, got {k_cache.shape[2]}"
    )
    require_ints((torch.int32, torch.int64), slot_mapping=slot_mapping)
    require(
        slot_mapping.shape == (num_tokens,) and slot_mapping.is_contiguous(),
        f"slot_mapping: expected [{num_tokens}], contiguous, got {list(slot_mapping.shape)}",
    )
    if num_tokens == 0:
        return
    _write_kv_kernel[(num_tokens,)](
        k, v, k_cache, v_cache, slot_mapping, num_kv_heads, *k.stride()[:2], *v.stride()[:2],
        *k_cache.stride()[:3], *v_cache.stride()[:3], HEAD_DIM=head_dim, BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_H=triton.next_power_of_2(num_kv_heads), BLOCK_SIZE=k_cache.shape[1], num_warps=4,
    )  # fmt: skip
