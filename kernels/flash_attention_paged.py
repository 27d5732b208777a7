"""Prefill over a paged KV cache: a chunk of new tokens per sequence attends to all its tokens in the cache.

What chunked prefill and prefix caching need, decode steps in the same batch included. The walk over the keys is that
of `kernels.flash_attention`; tiles of K and V are gathered through the block table, row by row, so any block size
fits. The query heads that share a KV head are rows of one tile, so that a short chunk still fills it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.flash_attention import LN_2, LOG2_E, locate, softmax_step
from kernels.relaunch import relaunch
from kernels.validate import FLOATS, require, require_caches, require_ints, require_tensors, require_type
from kernels.variants import takes_hopper


@triton.jit
def _gather(
    k_ptr, v_ptr, block, token, seq_len, stride_kb, stride_kt, stride_vb, stride_vt,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, MASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """The K and V rows of `token` (BLOCK_N,), which lie in `block` (BLOCK_N,); zeros beyond the sequence."""
    dim = tl.arange(0, HEAD_DIM)
    offset = token % BLOCK_SIZE
    k_row = block.to(tl.int64) * stride_kb + offset * stride_kt
    v_row = k_row
    if not SAME_STRIDES:
        v_row = block.to(tl.int64) * stride_vb + offset * stride_vt
    if MASKED:
        live = (token < seq_len)[:, None]
        k = tl.load(k_ptr + k_row[:, None] + dim[None, :], mask=live, other=0.0)  # (BLOCK_N, HEAD_DIM)
        v = tl.load(v_ptr + v_row[:, None] + dim[None, :], mask=live, other=0.0)  # (BLOCK_N, HEAD_DIM)
    else:
        k = tl.load(k_ptr + k_row[:, None] + dim[None, :])
        v = tl.load(v_ptr + v_row[:, None] + dim[None, :])
    return k, v


@triton.jit
def _attend(
    acc, peak, total, q, k_ptr, v_ptr, table_ptr, begin, end, seq_len, last_key, qk_scale,
    stride_kb, stride_kt, stride_vb, stride_vt, HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, MASKED: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Attend to keys begin..end. last_key: (BLOCK_M,), the last key that each row sees; read only if MASKED."""
    token = begin + tl.arange(0, BLOCK_N)
    # Asked for one tile ahead: the rows of K and V cannot be asked for before.
    block = tl.load(table_ptr + token // BLOCK_SIZE, mask=token < seq_len, other=0)  # (BLOCK_N,)
    for start in tl.range(begin, end, BLOCK_N):
        token = start + tl.arange(0, BLOCK_N)
        k, v = _gather(
            k_ptr, v_ptr, block, token, seq_len, stride_kb, stride_kt, stride_vb, stride_vt, HEAD_DIM, BLOCK_SIZE,
            MASKED, SAME_STRIDES,
        )  # fmt: skip
        score = tl.dot(q, k.T, input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        if MASKED:
            score = tl.where(token[None, :] <= last_key[:, None], score, float("-inf"))
        p, alpha, peak, total = softmax_step(score, qk_scale, peak, total, MASKED)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # (BLOCK_M, HEAD_DIM)
        following = token + BLOCK_N
        block = tl.load(table_ptr + following // BLOCK_SIZE, mask=following < seq_len, other=0)
    return acc, peak, total


# Values that change from step to step or from server to server must not each cost a compilation.
@triton.jit(do_not_specialize=["num_seqs", "stride_table", "stride_lh"])
def _paged_prefill_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, cu_q_ptr, o_ptr, lse_ptr, num_seqs, qk_scale,
    stride_qt, stride_qh, stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh, stride_table,
    stride_ot, stride_oh, stride_lh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SAME_STRIDES: tl.constexpr,
):  # fmt: skip
    """Program (tile of BLOCK_M // GROUP tokens, KV head). Row r of a tile is token r // GROUP, head r % GROUP."""
    TOKENS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a long sequence's last tile is its longest, so it goes first
    kv_head = tl.program_id(1)
    seq, first_tile = locate(cu_q_ptr, num_seqs, tile, TOKENS)
    first_query = tl.load(cu_q_ptr + seq)
    q_len = tl.load(cu_q_ptr + seq + 1) - first_query
    first_token = (tile - first_tile) * TOKENS
    if first_token >= q_len:
        return
    seq_len = tl.load(seq_lens_ptr + seq)
    row = tl.arange(0, BLOCK_M)
    dim = tl.arange(0, HEAD_DIM)
    token = first_token + row // GROUP  # (BLOCK_M,), in the chunk
    head = kv_head * GROUP + row % GROUP
    live = (row < TOKENS * GROUP) & (token < q_len)
    query = (first_query + token).to(tl.int64)
    q_row = q_ptr + query * stride_qt + head * stride_qh
    q = tl.load(q_row[:, None] + dim[None, :], mask=live[:, None], other=0.0)  # (BLOCK_M, HEAD_DIM)
    acc = tl.zeros([BLOCK_M, HEAD_DIM], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    offset = seq_len - q_len  # tokens that were in the cache before the chunk
    last_key = token + offset
    end = tl.minimum(seq_len, tl.maximum(first_token + TOKENS + offset, 0))
    whole = tl.minimum(seq_len, tl.maximum(first_token + offset + 1, 0)) // BLOCK_N * BLOCK_N
    table_ptr += seq * stride_table.to(tl.int64)
    k_ptr += kv_head * stride_kh.to(tl.int64)
    v_ptr += kv_head * stride_vh.to(tl.int64)
    acc, peak, total = _attend(
        acc, peak, total, q, k_ptr, v_ptr, table_ptr, 0, whole, seq_len, last_key, qk_scale,
        stride_kb, stride_kt, stride_vb, stride_vt, HEAD_DIM, BLOCK_SIZE, BLOCK_N, False, SAME_STRIDES,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q, k_ptr, v_ptr, table_ptr, whole, end, seq_len, last_key, qk_scale,
        stride_kb, stride_kt, stride_vb, stride_vt, HEAD_DIM, BLOCK_SIZE, BLOCK_N, True, SAME_STRIDES,
    )  # fmt: skip
    divisor = tl.where(total == 0.0, 1.0, total)  # a query without keys gives zeros
    o_row = o_ptr + query * stride_ot + head * stride_oh
    o = (acc * (1.0 / divisor)[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_row[:, None] + dim[None, :], o, mask=live[:, None])
    if lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(divisor)) * LN_2)
        tl.store(lse_ptr + head.to(tl.int64) * stride_lh + query, lse, mask=live)


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct. block_m: rows (token, head) in a tile. block_n: keys."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def plan_for(head_dim: int, element_size: int) -> Plan:
    """The launch that was fastest on an H200 (sm_90) with 16-bit elements."""
    if element_size > 2:
        return Plan(32, 32, num_warps=4, num_stages=2)
    if head_dim > 128:
        return Plan(128, 64, num_warps=8, num_stages=2)
    return Plan(64, 64, num_warps=4, num_stages=2)


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    variant: str | None = None,
) -> torch.Tensor:
    """Causal attention of each sequence's newest tokens over all its tokens in the KV cache.

    q: [num_tokens, num_heads, head_dim], float16, bfloat16 or float32; the chunks of all sequences, packed. head_dim 16
        to 256, a power of two, contiguous.
    k_cache, v_cache, block_table, seq_lens, scale: as in kernels.paged_attention; seq_lens counts the chunk, whose K
        and V are already in the cache. A query that is the sequence's i-th last token sees all but the last i - 1 keys.
    cu_seqlens_q: [num_seqs + 1] int32, on the device: sequence s has the queries cu_seqlens_q[s] to
        cu_seqlens_q[s + 1]; begins with 0, ends with num_tokens. Chunks may be empty, or of one token: a decode step.
        Lengths are not read on the host, so they are not checked: a chunk must not be longer than its sequence.
    out: written and returned, if given: like q. lse: [num_heads, num_tokens] float32, written if given: the natural
        logarithm of each query's sum of exponentials.
    variant: "tl" for this file's kernel, "hopper" for that of flash_attention_paged_hopper; None takes the faster one
        of those that can run here, and warns once where a Hopper GPU has to do without its own.

    Raises TypeError or ValueError, naming the argument, before anything is launched. Safe to capture in a CUDA graph:
    values of block_table, seq_lens and cu_seqlens_q may change between replays, shapes may not.
    """
    _validate(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse)
    on_hopper = takes_hopper("paged_prefill", variant, q, lambda: _hopper(q, k_cache, v_cache, seq_lens))
    out = torch.empty_like(q) if out is None else out
    scale = q.shape[2] ** -0.5 if scale is None else scale
    if q.shape[0] == 0:
        return out
    if on_hopper:
        from kernels import flash_attention_paged_hopper

        flash_attention_paged_hopper.launch(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse, scale)
    else:
        launch(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse, scale)
    return out


def _hopper(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, seq_lens: torch.Tensor
) -> tuple[str | None, bool]:
    from kernels import flash_attention_paged_hopper as hopper

    return hopper.unsupported(q, k_cache, v_cache), hopper.faster(q, seq_lens)


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float,
) -> None:  # fmt: skip
    """Run this file's kernel on arguments that `paged_prefill` would find right. q and out may have unused rows.

    For callers that know so, step after step: checking takes longer than launching.
    """
    num_tokens, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    num_seqs = seq_lens.shape[0]
    group = num_heads // num_kv_heads
    plan = plan_for(head_dim, q.element_size())
    block_m = max(plan.block_m, triton.next_power_of_2(group))
    tiles = num_tokens // (block_m // group) + num_seqs
    k_strides, v_strides = k_cache.stride()[:3], v_cache.stride()[:3]
    relaunch(
        _paged_prefill_kernel, (tiles, num_kv_heads, 1),
        (q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, lse, num_seqs, scale * LOG2_E.value,
         *q.stride()[:2], *k_strides, *v_strides, block_table.stride(0), *out.stride()[:2],
         lse.stride(0) if lse is not None else 0),
        (head_dim, group, block_size, block_m, plan.block_n, k_strides == v_strides),
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip


def _validate(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, out: torch.Tensor | None, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    named = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    given = {name: x for name, x in (("out", out), ("lse", lse)) if x is not None}
    require_tensors(q=q, **named, cu_seqlens_q=cu_seqlens_q, **given)
    require(q.ndim == 3, f"q: expected [num_tokens, num_heads, head_dim], got {list(q.shape)}")
    require_type(q.dtype in FLOATS, f"q: expected float16, bfloat16 or float32, got {q.dtype}")
    num_tokens, num_heads, head_dim = q.shape
    require(head_dim in (16, 32, 64, 128, 256), f"q: head_dim must be a power of two from 16 to 256, got {head_dim}")
    require_caches(k_cache, v_cache, q.dtype, head_dim)
    num_kv_heads = k_cache.shape[2]
    require(
        num_heads % num_kv_heads == 0,
        f"q: num_heads ({num_heads}) must be a multiple of the cache's num_kv_heads ({num_kv_heads})",
    )
    require_ints((torch.int32,), block_table=block_table, seq_lens=seq_lens, cu_seqlens_q=cu_seqlens_q)
    require(
        seq_lens.ndim == 1 and seq_lens.shape[0] > 0 and seq_lens.is_contiguous(),
        f"seq_lens: expected [num_seqs], contiguous, at least one, got {list(seq_lens.shape)}",
    )
    num_seqs = seq_lens.shape[0]
    require(
        block_table.ndim == 2 and block_table.shape[0] == num_seqs and block_table.stride(1) in (0, 1),
        f"block_table: expected [{num_seqs}, max_blocks] with contiguous rows, got {list(block_table.shape)}",
    )
    require(
        cu_seqlens_q.shape == (num_seqs + 1,) and cu_seqlens_q.is_contiguous(),
        f"cu_seqlens_q: expected [{num_seqs + 1}], contiguous, got {list(cu_seqlens_q.shape)}",
    )
    for name, x in (("q", q), ("out", out)):
        require(x is None or x.stride(2) == 1, f"{name}: head_dim must be contiguous")
    require(
        out is None or (out.shape == q.shape and out.dtype == q.dtype), f"out: expected {list(q.shape)} of {q.dtype}"
    )
    require(
        lse is None or (lse.shape == (num_heads, num_tokens) and lse.dtype == torch.float32 and lse.stride(1) == 1),
        f"lse: expected [{num_heads}, {num_tokens}] of torch.float32, tokens contiguous",
    )
