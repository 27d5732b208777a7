"""Decode attention over a paged KV cache: one new query token per sequence, work split by the actual lengths.

Flash-Decoding (Dao et al., 2023) splits every sequence into the same number of pieces, so the longest one decides when
the launch ends. Here all sequences are laid end to end and cut into equal chunks of KV tiles, as Stream-K (Osama et
al., arXiv:2301.03598) does for matrix products: every program reads the same number of bytes, whatever the lengths. A
chunk may end inside a sequence; its partial result goes to a workspace, and the last program to arrive there combines
the partials by their log-sum-exp, in the same launch. The plan is derived from `seq_lens` on the device, in every
program anew, so nothing is read back to the host and a captured CUDA graph stays right when the lengths change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton import JITFunction

from kernels.early_start import early_options, let_next_start, wait_for_previous
from kernels.kv_cache_quantized import QuantizedCache
from kernels.split_kv import LOG2_E, attend, chunk_of, combine, count_tiles, locate, num_tiles, store_rows
from kernels.split_kv_quantized import attend_quantized
from kernels.validate import FLOATS, require, require_caches, require_ints, require_tensors, require_type

MAX_PLANNED = 1024  # sequences that a program plans at a time


# Values that change from step to step or from server to server must not each cost a compilation.
@triton.jit(do_not_specialize=["num_seqs", "num_heads", "stride_table", "stride_ls", "stride_lh"])
def _paged_attention_kernel(
    q_ptr, k_ptr, v_ptr, table_ptr, seq_lens_ptr, o_ptr, lse_ptr, part_o_ptr, part_lse_ptr, arrivals_ptr,
    num_seqs, num_heads, qk_scale, stride_qs, stride_qh, stride_kb, stride_kt, stride_kh,
    stride_vb, stride_vt, stride_vh, stride_table, stride_os, stride_oh, stride_ls, stride_lh,
    HEAD_DIM: tl.constexpr, GROUP: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_SIZE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
    SAME_STRIDES: tl.constexpr, k_scales_ptr=None, v_scales_ptr=None, stride_sb=0, stride_sh=0,
    KIND: tl.constexpr = None, ASM: tl.constexpr = False, WARPS: tl.constexpr = 1,
    EARLY: tl.constexpr = False,
):  # fmt: skip
    """Program (KV head, chunk). Neighbours read the same tokens of different heads at the same time.

    Reads 2 * sum(seq_lens) * num_kv_heads * HEAD_DIM elements of K and V, once each; 4 * sum(seq_lens) * num_heads *
    HEAD_DIM FLOPs. `arrivals` is all zero before and after.
    """
    let_next_start(EARLY)
    kv_head = tl.program_id(0)
    chunk = tl.program_id(1)
    total, longest = count_tiles(seq_lens_ptr, num_seqs, BLOCK_N, BLOCK_S)
    # A sequence of `longest` tiles gives longest / n partials if a chunk has n. Loading BLOCK_C of them takes about as
    # long as 4 tiles: no fewer tiles a chunk than balance the two.
    least = tl.ceil(tl.sqrt(longest * 4 / BLOCK_C)).to(tl.int32)
    num_chunks = tl.minimum(tl.cdiv(total, least), tl.num_programs(1))
    if chunk >= num_chunks:
        return
    size = total // num_chunks
    longer = total % num_chunks
    tile = chunk * size + tl.minimum(chunk, longer)
    stop = tile + size + (chunk < longer).to(tl.int32)
    seq, start = locate(seq_lens_ptr, num_seqs, tile, BLOCK_N, BLOCK_S)

    head = kv_head * GROUP
    row = tl.arange(0, BLOCK_G)
    dim = tl.arange(0, HEAD_DIM)
    k_ptr += kv_head * stride_kh.to(tl.int64)
    v_ptr += kv_head * stride_vh.to(tl.int64)
    if KIND is not None:
        k_scales_ptr += kv_head * stride_sh
        v_scales_ptr += kv_head * stride_sh
    wait_for_previous(EARLY)  # all above depends on the lengths alone
    while tile < stop:
        seq_len = tl.load(seq_lens_ptr + seq)
        end = start + num_tiles(seq_len, BLOCK_N)
        seq_row = seq.to(tl.int64)
        q_row = q_ptr + seq_row * stride_qs + (head + row) * stride_qh
        q = tl.load(q_row[:, None] + dim[None, :], mask=(row < GROUP)[:, None], other=0.0)  # (BLOCK_G, HEAD_DIM)
        table_row = table_ptr + seq_row * stride_table
        begin_token = (tile - start) * BLOCK_N
        end_token = (tl.minimum(end, stop) - start) * BLOCK_N
        if KIND is None:
            o, lse = attend(
                q, k_ptr, v_ptr, table_row, begin_token, end_token, seq_len, qk_scale,
                stride_kb, stride_kt, stride_vb, stride_vt, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_G, SAME_STRIDES,
            )  # fmt: skip
        else:
            o, lse = attend_quantized(
                q, k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_row, begin_token, end_token, seq_len, qk_scale,
                stride_kb, stride_kt, stride_sb, KIND, ASM, BLOCK_SIZE, BLOCK_N, HEAD_DIM, BLOCK_G, WARPS,
            )  # fmt: skip
        first = chunk_of(start, size, longer)
        last = chunk_of(end - 1, size, longer)
        o_row = o_ptr + seq_row * stride_os + head * stride_oh
        if first == last:
            store_rows(o, lse, o_row, lse_ptr, seq_row * stride_ls + head * stride_lh, stride_oh, stride_lh, GROUP)
        else:
            # Two slots a chunk: of all sequences in it, only the first can have begun before and the last go on.
            slot = (2 * chunk + (chunk == first).to(tl.int32)) * num_heads + head
            tl.store(part_o_ptr + (slot + row)[:, None] * HEAD_DIM + dim[None, :], o, mask=(row < GROUP)[:, None])
            tl.store(part_lse_ptr + slot + row, lse, mask=row < GROUP)
            tl.debug_barrier()  # every thread's stores come before the arrival that announces them
            # At most one sequence begins in a chunk and goes on, so (first chunk, head) names its counter.
            arrival_ptr = arrivals_ptr + first * tl.num_programs(0) + kv_head
            if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == last - first:
                o_all, lse_all = combine(
                    part_o_ptr, part_lse_ptr, first, last, head, num_heads, HEAD_DIM, GROUP, BLOCK_P, BLOCK_C
                )
                store_rows(
                    o_all, lse_all, o_row, lse_ptr, seq_row * stride_ls + head * stride_lh, stride_oh, stride_lh, GROUP
                )
                tl.store(arrival_ptr, 0)
        tile = end
        start = end
        seq += 1


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct.

    block_n: tokens in a KV tile. ctas_per_sm: programs that share an SM. combined_elements: elements of partial results
    that a program holds at once. max_registers: of a thread, if the compiler is to be held to so many.
    """

    block_n: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int
    combined_elements: int = 8192
    max_registers: int | None = None

    def num_chunks(self, num_kv_heads: int, device: torch.device) -> int:
        """Chunks that all SMs work on at once."""
        return max(1, count_sms(device) * self.ctas_per_sm // num_kv_heads)


def count_sms(device: torch.device) -> int:
    """SMs of a GPU. The interpreter has two here, so that it splits sequences as well."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


def plan_for(head_dim: int, element_size: int) -> Plan:
    """The launch that was fastest on an H200 (sm_90) with 16-bit elements.

    Small programs win: a tile's 16 rows of scores are little work, more warps only wait for each other, and four
    programs an SM hide each other's pauses. What they share is shared memory (block_n * head_dim * 2 * element_size *
    (num_stages - 1) each) and registers.
    """
    if head_dim * element_size > 256:
        return Plan(block_n=32 * 512 // (head_dim * element_size), num_warps=4, num_stages=3, ctas_per_sm=2)
    return Plan(block_n=32, num_warps=2, num_stages=3 if head_dim * element_size > 128 else 4, ctas_per_sm=4)


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of `paged_attention`; its size depends on heads and device alone, not on batch or lengths.

    Make one, keep it, and pass it to every call of a model's layers; two calls that may run at the same time (on two
    streams) need two. part_o: [slots, num_heads, head_dim] float32. part_lse: [slots, num_heads] float32.
    arrivals: [chunks, num_kv_heads] int32, zero between calls.
    """

    part_o: torch.Tensor
    part_lse: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(
        cls, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str,
        plan: Plan | None = None,
    ) -> Workspace:  # fmt: skip
        """Workspace for any batch of this many heads, of this head_dim and dtype, on `device`."""
        plan = plan or plan_for(head_dim, dtype.itemsize)
        chunks = plan.num_chunks(num_kv_heads, torch.device(device))
        return cls(
            torch.empty(2 * chunks, num_heads, head_dim, dtype=torch.float32, device=device),
            torch.empty(2 * chunks, num_heads, dtype=torch.float32, device=device),
            torch.zeros(chunks, num_kv_heads, dtype=torch.int32, device=device),
        )


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    early: bool = False,
) -> torch.Tensor:
    """Attention of one query token per sequence over that sequence's blocks of the KV cache.

    q: [num_seqs, num_heads, head_dim], float16, bfloat16 or float32; head_dim 16 to 256, a power of two.
    k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] of q's dtype, any strides as long as head_dim is
        contiguous, so that both halves of a joint cache or a layout with heads first pass as views. num_kv_heads
        divides num_heads; query head h reads KV head h // (num_heads // num_kv_heads).
    block_table: [num_seqs, max_blocks] int32; entry [s, i] holds tokens i * block_size onwards of sequence s. Entries
        past ceil(seq_lens[s] / block_size) are never read.
    seq_lens: [num_seqs] int32, on the device, tokens to attend to; the newest token's K and V are already in the cache.
        A length of 0 gives an output of zeros and an lse of -inf. No length may exceed max_blocks * block_size: the
        lengths are not read on the host, so this is not checked.
    scale: factor of q·k, 1 / sqrt(head_dim) if None.
    out: written and returned, if given: like q, head_dim contiguous. lse: [num_seqs, num_heads] float32, written if
        given: the natural logarithm of each query's sum of exponentials, what merging two results needs.
    workspace: scratch memory that is kept between calls. If None, one is made for this call, which costs a memset.
    early: the launch may begin, and read seq_lens, before the kernel ahead of it has ended, where the GPU can
        (kernels.early_start). No kernel that started early may have written seq_lens.

    Raises TypeError or ValueError, naming the argument, before anything is launched. Safe to capture in a CUDA graph:
    values of block_table and seq_lens may change between replays, shapes may not.
    """
    require_tensors(q=q, k_cache=k_cache, v_cache=v_cache, block_table=block_table, seq_lens=seq_lens)
    require_queries(q, k_cache.shape[2] if k_cache.ndim == 4 else 1, block_table, seq_lens, out, lse)
    require_caches(k_cache, v_cache, q.dtype, q.shape[2])
    plan = plan_for(q.shape[2], q.element_size())
    return launch(q, k_cache, v_cache, block_table, seq_lens, scale, out, lse, workspace, plan, early=early)


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    scale: float | None, out: torch.Tensor | None, lse: torch.Tensor | None, workspace: Workspace | None, plan: Plan,
    quantized: QuantizedCache | None = None, early: bool = False,
) -> torch.Tensor:  # fmt: skip
    """Compute what `paged_attention` promises, of arguments that were found right.

    quantized: where k_cache and v_cache, its codes, have their scales from; None where they are K and V themselves.
    """
    num_seqs, num_heads, head_dim = q.shape
    _, block_size, num_kv_heads, _ = k_cache.shape
    out = torch.empty_like(q) if out is None else out
    if num_seqs == 0:
        return out
    workspace = workspace or Workspace.allocate(num_heads, num_kv_heads, head_dim, q.dtype, q.device, plan)
    most_tiles = num_seqs * max(1, triton.cdiv(block_table.shape[1] * block_size, plan.block_n))
    chunks = min(plan.num_chunks(num_kv_heads, q.device), most_tiles)
    require(
        workspace.part_o.shape[1:] == (num_heads, head_dim) and workspace.arrivals.shape[1] == num_kv_heads
        and workspace.arrivals.shape[0] >= chunks and workspace.part_o.device == q.device,
        f"workspace: made for other inputs; Workspace.allocate({num_heads}, {num_kv_heads}, {head_dim},"
        f" {q.dtype}, {q.device}) fits",
    )  # fmt: skip
    group = num_heads // num_kv_heads
    block_p = triton.next_power_of_2(group)
    scale = head_dim**-0.5 if scale is None else scale
    scales: dict[str, object] = {}
    least = 16  # rows of the tensor cores' left operand
    if quantized is not None:
        least = 8  # columns of their right one
        stride_sb, stride_sh, _ = quantized.k_scales.stride()
        scales = {
            "k_scales_ptr": quantized.k_scales, "v_scales_ptr": quantized.v_scales, "stride_sb": stride_sb,
            "stride_sh": stride_sh, "KIND": quantized.kind, "ASM": isinstance(_paged_attention_kernel, JITFunction),
            "WARPS": max(1, min(plan.num_warps, k_cache.shape[3] // 16)), "maxnreg": plan.max_registers,
        }  # fmt: skip
    _paged_attention_kernel[(num_kv_heads, chunks)](
        q, k_cache, v_cache, block_table, seq_lens, out, lse, workspace.part_o, workspace.part_lse, workspace.arrivals,
        num_seqs, num_heads, scale * LOG2_E.value, *q.stride()[:2], *k_cache.stride()[:3], *v_cache.stride()[:3],
        block_table.stride(0), *out.stride()[:2], *(lse.stride() if lse is not None else (0, 0)),
        HEAD_DIM=head_dim, GROUP=group, BLOCK_G=max(least, block_p), BLOCK_P=block_p, BLOCK_SIZE=block_size,
        BLOCK_N=plan.block_n, BLOCK_S=min(MAX_PLANNED, max(32, triton.next_power_of_2(num_seqs))),
        BLOCK_C=max(4, plan.combined_elements // (block_p * head_dim)),
        SAME_STRIDES=k_cache.stride() == v_cache.stride(), num_warps=plan.num_warps, num_stages=plan.num_stages,
        **scales, **(early_options(q.device) if early else {}),
    )  # fmt: skip
    return out


def require_queries(
    q: torch.Tensor, num_kv_heads: int, block_table: torch.Tensor, seq_lens: torch.Tensor,
    out: torch.Tensor | None, lse: torch.Tensor | None,
) -> None:  # fmt: skip
    """All arguments of decode attention but the cache are right, which has this many KV heads."""
    require_tensors(q=q, **{n: t for n, t in (("out", out), ("lse", lse)) if t is not None})
    require(q.ndim == 3, f"q: expected [num_seqs, num_heads, head_dim], got {list(q.shape)}")
    require_type(q.dtype in FLOATS, f"q: expected float16, bfloat16 or float32, got {q.dtype}")
    num_seqs, num_heads, head_dim = q.shape
    require(head_dim in (16, 32, 64, 128, 256), f"q: head_dim must be a power of two from 16 to 256, got {head_dim}")
    require(
        num_heads % num_kv_heads == 0,
        f"q: num_heads ({num_heads}) must be a multiple of the cache's num_kv_heads ({num_kv_heads})",
    )
    require_ints((torch.int32,), block_table=block_table, seq_lens=seq_lens)
    require(
        block_table.ndim == 2 and block_table.shape[0] == num_seqs and block_table.stride(1) in (0, 1),
        f"block_table: expected [{num_seqs}, max_blocks] with contiguous rows, got {list(block_table.shape)}",
    )
    require(
        seq_lens.shape == (num_seqs,) and seq_lens.is_contiguous(),
        f"seq_lens: expected [{num_seqs}], contiguous, got {list(seq_lens.shape)}",
    )
    for name, tensor in (("q", q), ("out", out)):
        require(tensor is None or tensor.stride(2) == 1, f"{name}: head_dim must be contiguous")
    require(
        out is None or (out.shape == q.shape and out.dtype == q.dtype), f"out: expected {list(q.shape)} of {q.dtype}"
    )
    require(
        lse is None or (lse.shape == (num_seqs, num_heads) and lse.dtype == torch.float32),
        f"lse: expected [{num_seqs}, {num_heads}] of torch.float32",
    )
