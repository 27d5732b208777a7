"""A paged KV cache in 8 or 4 bits: each token's K and V of a head have a scale of their own, set when they are written.

fp8 (e4m3): code = x / scale with scale = max |x| / 448. int8: the same with 127, rounded. int4: code * scale + offset,
with the least value as the offset, since K and V of a token are seldom centred; byte j holds dimension j in its lower
half and head_dim / 2 + j in its upper, so that the two halves of a head are two matrices and need not be interleaved.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.validate import FLOATS, require, require_ints, require_tensors, require_type

KINDS = {"fp8": torch.float8_e4m3fn, "int8": torch.int8, "int4": torch.uint8}  # and the dtype of the codes
LARGEST_FP8 = tl.constexpr(448.0)


@dataclass(frozen=True)
class QuantizedCache:
    """kind: "fp8", "int8" or "int4". k, v: codes [num_blocks, block_size, num_kv_heads, head_dim], of int4 half as many
    bytes. k_scales, v_scales: [num_blocks, num_kv_heads, block_size] float32; of int4 int32, a word with the scale in
    its lower half and the offset in its upper, both float16.

    Scales of a block's tokens are neighbours, so that a head's program reads no other head's.
    """

    kind: str
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor

    @classmethod
    def allocate(
        cls, kind: str, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, device: torch.device | str
    ) -> QuantizedCache:
        """A cache of zeros. ValueError for a kind that is unknown or not for this GPU, or too small a head_dim."""
        require(kind in KINDS, f"kind: expected {', '.join(KINDS)}, got {kind!r}")
        require(
            kind != "int4" or (head_dim >= 32 and head_dim % 2 == 0),
            f"head_dim: int4 takes even ones from 32 on, whose halves fill a matrix instruction, got {head_dim}",
        )
        require_kind(kind, device)
        width = head_dim // 2 if kind == "int4" else head_dim
        k, v = (
            torch.zeros(num_blocks, block_size, num_kv_heads, width, dtype=torch.uint8, device=device) for _ in range(2)
        )
        dtype = torch.int32 if kind == "int4" else torch.float32
        k_scales, v_scales = (
            torch.zeros(num_blocks, num_kv_heads, block_size, dtype=dtype, device=device) for _ in range(2)
        )
        return cls(kind, k.view(KINDS[kind]), v.view(KINDS[kind]), k_scales, v_scales)

    @property
    def head_dim(self) -> int:
        return self.k.shape[3] * (2 if self.kind == "int4" else 1)

    @property
    def bytes(self) -> int:
        """Of codes and scales together."""
        return sum(t.numel() * t.element_size() for t in (self.k, self.v, self.k_scales, self.v_scales))


def require_kind(kind: str, device: torch.device | str) -> None:
    """ValueError where the GPU has no instructions for a kind of codes."""
    major, minor = _capability(device)
    require(
        kind != "fp8" or (major, minor) >= (8, 9),
        f"kind: fp8 needs a GPU of compute capability 8.9 or later, this one has {major}.{minor}; int8 takes as few"
        " bytes",
    )


def _capability(device: torch.device | str) -> tuple[int, int]:
    """Compute capability; on a CPU, whose interpreter knows every type, the latest."""
    return torch.cuda.get_device_capability(device) if torch.device(device).type == "cuda" else (9, 0)


@triton.jit
def _quantize_rows(x_ptr, stride_h, codes_ptr, stride_ch, scales_ptr, stride_sh, num_kv_heads, KIND: tl.constexpr,
                   HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr):  # fmt: skip
    """Quantize and store one token's rows, one a head. BLOCK_D spans HEAD_DIM, or half of it for int4."""
    head = tl.arange(0, BLOCK_H)
    dim = tl.arange(0, BLOCK_D)
    row = x_ptr + head[:, None] * stride_h + dim[None, :]
    codes = codes_ptr + head[:, None] * stride_ch + dim[None, :]
    here = head < num_kv_heads
    if KIND == "int4":
        live = here[:, None] & (dim < HEAD_DIM // 2)[None, :]
        low = tl.load(row, mask=live, other=0.0).to(tl.float32)  # (BLOCK_H, BLOCK_D)
        high = tl.load(row + HEAD_DIM // 2, mask=live, other=0.0).to(tl.float32)
        least = tl.min(tl.where(live, tl.minimum(low, high), float("inf")), 1)
        most = tl.max(tl.where(live, tl.maximum(low, high), float("-inf")), 1)
        offset = least.to(tl.float16)
        scale = ((most - least) / 15.0).to(tl.float16)
        factor = tl.where(scale == 0.0, 0.0, 1.0 / tl.where(scale == 0.0, 1.0, scale.to(tl.float32)))
        low = _code((low - offset.to(tl.float32)[:, None]) * factor[:, None])
        high = _code((high - offset.to(tl.float32)[:, None]) * factor[:, None])
        tl.store(codes, (low | (high << 4)).to(tl.uint8), mask=live)
        word = scale.to(tl.uint16, bitcast=True).to(tl.int32) | (offset.to(tl.uint16, bitcast=True).to(tl.int32) << 16)
        tl.store(scales_ptr + head * stride_sh, word, mask=here)
    else:
        live = here[:, None] & (dim < HEAD_DIM)[None, :]
        x = tl.load(row, mask=live, other=0.0).to(tl.float32)  # (BLOCK_H, BLOCK_D)
        peak = tl.max(tl.abs(x), 1)
        scale = peak / (LARGEST_FP8 if KIND == "fp8" else 127.0)
        x = x / tl.where(scale == 0.0, 1.0, scale)[:, None]
        if KIND == "fp8":
            # Rounding of the division may lead past the largest, which is next to NaN
            x = tl.minimum(tl.maximum(x, -LARGEST_FP8), LARGEST_FP8).to(tl.float8e4nv)
        else:
            x = tl.floor(x + 0.5).to(tl.int8)
        tl.store(codes, x, mask=live)
        tl.store(scales_ptr + head * stride_sh, scale, mask=here)


@triton.jit
def _code(x):
    """The nearest of 0 to 15."""
    return tl.minimum(tl.maximum(tl.floor(x + 0.5), 0.0), 15.0).to(tl.int32)


@triton.jit
def _write_quantized_kernel(
    k_ptr, v_ptr, k_codes_ptr, v_codes_ptr, k_scales_ptr, v_scales_ptr, slot_ptr, num_kv_heads,
    stride_kn, stride_kh, stride_vn, stride_vh, stride_cb, stride_ct, stride_ch, stride_sb, stride_sh,
    KIND: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_H: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    """Program = one token. Reads 2 * num_kv_heads * HEAD_DIM elements; nothing if its slot is negative."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slot_ptr + token).to(tl.int64)
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    place = block * stride_cb + offset * stride_ct
    scale_place = block * stride_sb + offset
    _quantize_rows(
        k_ptr + token * stride_kn, stride_kh, k_codes_ptr + place, stride_ch, k_scales_ptr + scale_place, stride_sh,
        num_kv_heads, KIND, HEAD_DIM, BLOCK_D, BLOCK_H,
    )  # fmt: skip
    _quantize_rows(
        v_ptr + token * stride_vn, stride_vh, v_codes_ptr + place, stride_ch, v_scales_ptr + scale_place, stride_sh,
        num_kv_heads, KIND, HEAD_DIM, BLOCK_D, BLOCK_H,
    )  # fmt: skip


def write_kv_quantized(k: torch.Tensor, v: torch.Tensor, cache: QuantizedCache, slot_mapping: torch.Tensor) -> None:
    """Quantize the K and V of new tokens into their slots of the cache, in place.

    k, v: [num_tokens, num_kv_heads, head_dim], float16, bfloat16 or float32, head_dim contiguous. Of int4, no value may
        exceed float16's range.
    slot_mapping: as kernels.kv_cache.write_kv has it; a negative slot is skipped.

    Raises TypeError or ValueError, naming the argument, before anything is written.
    """
    require_tensors(k=k, v=v, cache=cache.k, slot_mapping=slot_mapping)
    require_kind(cache.kind, cache.k.device)
    _, block_size, num_kv_heads, _ = cache.k.shape
    shape = [num_kv_heads, cache.head_dim]
    for name, tensor in (("k", k), ("v", v)):
        require(
            tensor.ndim == 3 and list(tensor.shape[1:]) == shape,
            f"{name}: expected [num_tokens, {num_kv_heads}, {cache.head_dim}], got {list(tensor.shape)}",
        )
        require_type(tensor.dtype in FLOATS, f"{name}: expected float16, bfloat16 or float32, got {tensor.dtype}")
        require(tensor.stride(2) == 1, f"{name}: head_dim must be contiguous, its stride is {tensor.stride(2)}")
    require(v.shape == k.shape, f"v: expected {list(k.shape)} like k, got {list(v.shape)}")
    require_ints((torch.int32, torch.int64), slot_mapping=slot_mapping)
    require(
        slot_mapping.shape == (k.shape[0],) and slot_mapping.is_contiguous(),
        f"slot_mapping: expected [{k.shape[0]}], contiguous, got {list(slot_mapping.shape)}",
    )
    if k.shape[0] == 0:
        return
    _write_quantized_kernel[(k.shape[0],)](
        k, v, cache.k, cache.v, cache.k_scales, cache.v_scales, slot_mapping, num_kv_heads, *k.stride()[:2],
        *v.stride()[:2], *cache.k.stride()[:3], *cache.k_scales.stride()[:2], KIND=cache.kind,
        HEAD_DIM=cache.head_dim, BLOCK_D=triton.next_power_of_2(cache.k.shape[3]),
        BLOCK_H=triton.next_power_of_2(num_kv_heads), BLOCK_SIZE=block_size, num_warps=4,
    )  # fmt: skip
