"""The control: the same inner loop, but every sequence cut into the same number of pieces (Flash-Decoding, 2023).

It differs from kernels.paged_attention in the split alone, so the difference in time is what the split is worth.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl

from kernels.paged_attention import plan_for
from kernels.split_kv import LOG2_E, attend, combine, store_rows
from labkit.benchmarks.peers import Inputs, Peer


@triton.jit
def _pieces_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, part_o_ptr, part_lse_ptr, qk_scale, stride_qs, stride_qh,
    stride_kb, stride_kt, stride_kh, stride_table,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_SIZE: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, piece, sequence)."""
    kv_head, piece, seq = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    row = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, HEAD_DIM)
    head = kv_head * GROUP
    seq_len = tl.load(seq_lens_ptr + seq)
    length = tl.cdiv(tl.cdiv(seq_len, BLOCK_N), SPLITS) * BLOCK_N
    begin = tl.minimum(piece * length, seq_len)
    end = tl.minimum(begin + length, seq_len)
    q = tl.load(q_ptr + seq * stride_qs + (head + row)[:, None] * stride_qh + dim[None, :], (row < GROUP)[:, None])
    o, lse = attend(
        q, k_ptr + kv_head * stride_kh, v_ptr + kv_head * stride_kh, table_ptr + seq * stride_table, begin, end,
        seq_len, qk_scale, stride_kb, stride_kt, stride_kb, stride_kt, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_G, True,
    )  # fmt: skip
    slot = 2 * (seq * SPLITS + piece) + (piece == 0).to(tl.int32)  # where `combine` looks for it
    place = (slot * tl.num_programs(0) + kv_head) * GROUP + row
    tl.store(part_o_ptr + place[:, None] * HEAD_DIM + dim[None, :], o, mask=(row < GROUP)[:, None])
    tl.store(part_lse_ptr + place, lse, mask=row < GROUP)


@triton.jit
def _combine_kernel(
    o_ptr, part_o_ptr, part_lse_ptr, stride_os, stride_oh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_C: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    """Program (KV head, sequence)."""
    head, seq = tl.program_id(0) * GROUP, tl.program_id(1)
    first = seq * SPLITS
    num_heads = tl.num_programs(0) * GROUP
    o, lse = combine(
        part_o_ptr, part_lse_ptr, first, first + SPLITS - 1, head, num_heads, HEAD_DIM, GROUP, BLOCK_P, BLOCK_C
    )
    store_rows(o, lse, o_ptr + seq * stride_os + head * stride_oh, None, 0, stride_oh, 0, GROUP)


def static_split(splits: int) -> Peer:
    """A peer that cuts every sequence into this many pieces. K and V caches must have equal strides."""

    def bind(x: Inputs) -> Callable[[], torch.Tensor]:
        num_seqs, num_heads, head_dim = x.q.shape
        _, block_size, num_kv_heads, _ = x.k_cache.shape
        group = num_heads // num_kv_heads
        plan = plan_for(head_dim, x.q.element_size())
        block_p = triton.next_power_of_2(group)
        block_c = max(1, plan.combined_elements // (block_p * head_dim))
        out = torch.empty_like(x.q)
        part_o = torch.empty(2 * num_seqs * splits, num_heads, head_dim, device=x.q.device)
        part_lse = torch.empty(2 * num_seqs * splits, num_heads, device=x.q.device)

        def call() -> torch.Tensor:
            _pieces_kernel[(num_kv_heads, splits, num_seqs)](
                x.q, x.k_cache, x.v_cache, x.block_table, x.seq_lens, part_o, part_lse, x.scale * LOG2_E.value,
                *x.q.stride()[:2], *x.k_cache.stride()[:3], x.block_table.stride(0), HEAD_DIM=head_dim, GROUP=group,
                BLOCK_G=max(16, block_p), BLOCK_SIZE=block_size, BLOCK_N=plan.block_n, SPLITS=splits,
                num_warps=plan.num_warps, num_stages=plan.num_stages,
            )  # fmt: skip
            _combine_kernel[(num_kv_heads, num_seqs)](
                out, part_o, part_lse, *out.stride()[:2], HEAD_DIM=head_dim, GROUP=group, BLOCK_P=block_p,
                BLOCK_C=block_c, SPLITS=splits, num_warps=plan.num_warps,
            )  # fmt: skip
            return out

        return call

    return bind
