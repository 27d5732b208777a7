"""FlashAttention, forward: exact attention that never writes the scores to memory, in Triton's language alone.

The online softmax is Milakov and Gimelshein's (arXiv:1805.02867), the tiling that of Dao et al. (arXiv:2205.14135) with
the loop order of FlashAttention-2 (arXiv:2307.08691): a program owns a tile of queries and walks over the keys. Tiles
arrive through tensor descriptors, which are the copy engine (TMA) on sm_90 and plain loads before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from kernels.validate import FLOATS, require, require_ints, require_tensors, require_type, tma_strides
from kernels.variants import takes_hopper

LOG2_E = tl.constexpr(1.4426950408889634)
LN_2 = tl.constexpr(0.6931471805599453)
HEAD_DIMS = (16, 32, 64, 80, 96, 128, 256)


@triton.jit
def locate(cu_seqlens_ptr, num_seqs, tile, BLOCK_M: tl.constexpr):
    """The packed sequence that query tile number `tile` belongs to, and the first tile of that sequence.

    Sequence s owns the tiles from cu_seqlens[s] // BLOCK_M + s on. That is room enough for all its rows and at most one
    tile too many, so the grid's size needs no length from the device (the idea is that of vLLM's unified attention).
    """
    low, high = 0, num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(cu_seqlens_ptr + middle) // BLOCK_M + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tl.load(cu_seqlens_ptr + low) // BLOCK_M + low


@triton.jit
def softmax_step(score, qk_scale, peak, total, MASKED: tl.constexpr):
    """One step of the online softmax: the tile's weights, the factor for what was summed before, the new peak and sum.

    The scale goes into the exponent's multiply-add; exp2 because it is the one exponential that the hardware has.
    """
    new_peak = tl.maximum(peak, tl.max(score, 1) * qk_scale)  # (BLOCK_M,)
    shift = new_peak
    if MASKED:  # a row that has seen no key yet: -inf - -inf would be NaN
        shift = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = tl.exp2(score * qk_scale - shift[:, None])  # (BLOCK_M, BLOCK_N)
    alpha = tl.exp2(peak - shift)
    return p, alpha, new_peak, total * alpha + tl.sum(p, 1)


@triton.jit
def _attend(
    acc, peak, total, q, k_desc, v_desc, batch, first_key, head, begin, end, k_len, last_key, qk_scale,
    BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Attend to keys begin..end. last_key: (BLOCK_M,), the last key that each query sees; read only if MASKED."""
    for start in tl.range(begin, end, BLOCK_N):
        k = k_desc.load([batch, first_key + start, head, 0]).reshape(BLOCK_N, BLOCK_D)
        score = tl.dot(q, k.T, input_precision="ieee")  # (BLOCK_M, BLOCK_N)
        key = start + tl.arange(0, BLOCK_N)
        if MASKED:
            score = tl.where(key[None, :] <= last_key[:, None], score, float("-inf"))
        p, alpha, peak, total = softmax_step(score, qk_scale, peak, total, MASKED)
        v = v_desc.load([batch, first_key + start, head, 0]).reshape(BLOCK_N, BLOCK_D)
        if MASKED:  # past the end may lie another sequence's NaN, and 0 * NaN is NaN
            v = tl.where((key < k_len)[:, None], v, 0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * alpha[:, None], input_precision="ieee")  # (BLOCK_M, BLOCK_D)
    return acc, peak, total


# Lengths change from call to call and must not each cost a compilation.
@triton.jit(do_not_specialize=["num_seqs", "q_len", "k_len", "stride_lb", "stride_lh"])
def _flash_attention_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, cu_q_ptr, cu_k_ptr, num_seqs, q_len, k_len, qk_scale,
    stride_ob, stride_os, stride_oh, stride_lb, stride_lh,
    GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    CAUSAL: tl.constexpr, VARLEN: tl.constexpr,
):  # fmt: skip
    """Program (query tile, query head, batch). Tiles are BLOCK_D wide; what is beyond HEAD_DIM loads as zeros.

    4 * q_len * k_len * BLOCK_D FLOPs and q_len * k_len exponentials per head, half of it if CAUSAL.
    """
    # The longest rows of a causal mask start first, so that the launch ends on short ones.
    tile = tl.num_programs(0) - 1 - tl.program_id(0) if CAUSAL else tl.program_id(0)
    head = tl.program_id(1)
    batch = tl.program_id(2)
    first_query, first_key = 0, 0
    if VARLEN:
        seq, first_tile = locate(cu_q_ptr, num_seqs, tile, BLOCK_M)
        tile -= first_tile
        first_query, first_key = tl.load(cu_q_ptr + seq), tl.load(cu_k_ptr + seq)
        q_len = tl.load(cu_q_ptr + seq + 1) - first_query
        k_len = tl.load(cu_k_ptr + seq + 1) - first_key
    if tile * BLOCK_M >= q_len:
        return
    row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    q = q_desc.load([batch, first_query + tile * BLOCK_M, head, 0]).reshape(BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    peak = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)

    end, whole = k_len, k_len  # keys that some query of the tile sees, and that all of them see
    last_key = row * 0 + (k_len - 1)
    if CAUSAL:  # bottom-right: the last query sees the last key
        offset = k_len - q_len
        last_key = tl.minimum(row + offset, k_len - 1)
        end = tl.minimum(k_len, tl.maximum((tile + 1) * BLOCK_M + offset, 0))
        whole = tl.minimum(k_len, tl.maximum(tile * BLOCK_M + offset + 1, 0))
    whole = whole // BLOCK_N * BLOCK_N
    acc, peak, total = _attend(
        acc, peak, total, q, k_desc, v_desc, batch, first_key, head // GROUP, 0, whole, k_len, last_key, qk_scale,
        BLOCK_N, BLOCK_D, False,
    )  # fmt: skip
    acc, peak, total = _attend(
        acc, peak, total, q, k_desc, v_desc, batch, first_key, head // GROUP, whole, end, k_len, last_key, qk_scale,
        BLOCK_N, BLOCK_D, True,
    )  # fmt: skip

    divisor = tl.where(total == 0.0, 1.0, total)  # a row without keys gives zeros
    o = (acc * (1.0 / divisor)[:, None]).to(o_ptr.dtype.element_ty)
    query = (first_query + row).to(tl.int64)
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    o_row = o_ptr + batch * stride_ob + query * stride_os + head * stride_oh  # (BLOCK_M,)
    dim = tl.arange(0, BLOCK_D)
    tl.store(o_row[:, None] + dim[None, :], o, mask=(row < q_len)[:, None] & (dim < HEAD_DIM)[None, :])
    if lse_ptr is not None:
        lse = tl.where(total == 0.0, float("-inf"), (peak + tl.log2(divisor)) * LN_2)
        tl.store(lse_ptr + batch * stride_lb + head * stride_lh + query, lse, mask=row < q_len)


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct. block_m, block_n: queries and keys in a tile."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int


def plan_for(head_dim: int, element_size: int) -> Plan:
    """The launch that was fastest on an H200 (sm_90) with 16-bit elements.

    Small programs win: two of them share an SM and nothing else, so that one's softmax runs beside the other's matrix
    products. Queries wait in registers, so with wide heads a wider tile of scores would spill.
    """
    if element_size > 2:
        return Plan(32, 32, num_warps=4, num_stages=2)
    return Plan(64, 64 if head_dim <= 128 else 32, num_warps=4, num_stages=3)


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    return_lse: bool = False,
    variant: str | None = None,
) -> torch.Tensor | tuple[torch.Tensor, torch.Tensor]:
    """softmax(q k^T * scale) v, head by head. Forward only: nothing is kept for a backward pass.

    q: [batch, q_len, num_heads, head_dim], float16, bfloat16 or float32; head_dim 16, 32, 64, 80, 96, 128 or 256. This
        is the layout of flash-attn; that of torch's SDPA, heads before tokens, passes as the view x.transpose(1, 2).
    k, v: [batch, k_len, num_kv_heads, head_dim] of q's dtype. num_kv_heads divides num_heads; query head h reads KV
        head h // (num_heads // num_kv_heads), and nothing is copied.
        In q, k, v and out head_dim is contiguous and the other strides are multiples of 16 bytes, as TMA demands.
    causal: query i sees the keys up to i + k_len - q_len (bottom-right: the last query sees every key).
    scale: factor of q·k, positive; 1 / sqrt(head_dim) if None.
    cu_seqlens_q, cu_seqlens_k: [num_seqs + 1] int32, on the device: sequences of different lengths, packed. q is then
        [total_q, num_heads, head_dim], k and v are [total_k, num_kv_heads, head_dim], and sequence s is the rows
        cu_seqlens[s] to cu_seqlens[s + 1]; both begin with 0 and end with the total. They are not read on the host, so
        their values are not checked, and a captured CUDA graph follows when they change.
    out: written and returned, if given: like q.
    return_lse: also give the natural logarithm of each query's sum of exponentials, float32, [batch, num_heads, q_len],
        packed: [num_heads, total_q]. A query that sees no key gives zeros and -inf.
    variant: "tl" for this file's kernel, "hopper" for that of flash_attention_hopper; None takes the faster one of
        those that can run here, and warns once where a Hopper GPU has to do without its own.

    Raises TypeError or ValueError, naming the argument, before anything is launched.
    """
    _validate(q, k, v, scale, cu_seqlens_q, cu_seqlens_k, out)
    out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
    packed = cu_seqlens_q is not None
    on_hopper = takes_hopper("flash_attention", variant, q, lambda: _hopper(q, k, packed))
    heads_first = (q.shape[-2], q.shape[0]) if packed else (q.shape[0], q.shape[2], q.shape[1])
    lse = torch.empty(heads_first, dtype=torch.float32, device=q.device) if return_lse else None
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    if k.numel() == 0 or q.numel() == 0:
        out.zero_()
        lse = None if lse is None else lse.fill_(float("-inf"))
    elif on_hopper:
        from kernels import flash_attention_hopper

        flash_attention_hopper.launch(q, k, v, out, lse, causal, scale)
    else:
        _launch(q, k, v, out, lse, causal, scale, cu_seqlens_q, cu_seqlens_k)
    return out if lse is None else (out, lse)


def _launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, causal: bool,
    scale: float, cu_seqlens_q: torch.Tensor | None, cu_seqlens_k: torch.Tensor | None, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Launch this file's kernel on arguments that are right; `plan` for tuning."""
    head_dim, varlen = q.shape[-1], cu_seqlens_q is not None
    num_seqs = cu_seqlens_q.shape[0] - 1 if cu_seqlens_q is not None else 1
    if varlen:
        q, k, v, out = (x.unsqueeze(0) for x in (q, k, v, out))
        lse = None if lse is None else lse.unsqueeze(0)
    batch, q_len, num_heads, _ = q.shape
    plan = plan or plan_for(head_dim, q.element_size())
    tiles = q_len // plan.block_m + num_seqs if varlen else triton.cdiv(q_len, plan.block_m)
    width = triton.next_power_of_2(head_dim)
    blocks = ((q, plan.block_m), (k, plan.block_n), (v, plan.block_n))
    _flash_attention_kernel[(tiles, num_heads, batch)](
        *(TensorDescriptor(x, list(x.shape), tma_strides(x), [1, rows, 1, width]) for x, rows in blocks),
        out, lse, cu_seqlens_q, cu_seqlens_k, num_seqs, q_len, k.shape[1], scale * LOG2_E.value, *out.stride()[:3],
        *(lse.stride()[:2] if lse is not None else (0, 0)), GROUP=num_heads // k.shape[2], HEAD_DIM=head_dim,
        BLOCK_M=plan.block_m, BLOCK_N=plan.block_n, BLOCK_D=width, CAUSAL=causal, VARLEN=varlen,
        num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip


def _hopper(q: torch.Tensor, k: torch.Tensor, packed: bool) -> tuple[str | None, bool]:
    from kernels import flash_attention_hopper as hopper

    reason = hopper.unsupported(q, k, packed)
    return reason, reason is None and hopper.faster(q, k)


def _validate(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float | None, cu_seqlens_q: torch.Tensor | None,
    cu_seqlens_k: torch.Tensor | None, out: torch.Tensor | None,
) -> None:  # fmt: skip
    cu_seqlens = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k, "out": out}
    require_tensors(q=q, k=k, v=v, **{name: x for name, x in cu_seqlens.items() if x is not None})
    require((cu_seqlens_q is None) == (cu_seqlens_k is None), "cu_seqlens_q and cu_seqlens_k: give both or neither")
    packed = cu_seqlens_q is not None
    shape = "[total_q, num_heads, head_dim]" if packed else "[batch, q_len, num_heads, head_dim]"
    require(q.ndim == 4 - packed, f"q: expected {shape}, got {list(q.shape)}")
    require_type(q.dtype in FLOATS, f"q: expected float16, bfloat16 or float32, got {q.dtype}")
    num_heads, head_dim = q.shape[-2:]
    require(head_dim in HEAD_DIMS, f"q: head_dim must be one of {', '.join(map(str, HEAD_DIMS))}, got {head_dim}")
    require(
        k.ndim == q.ndim and k.shape[-1] == head_dim and (packed or k.shape[0] == q.shape[0]),
        f"k: {list(k.shape)} does not match q {list(q.shape)}: same head_dim" + ("" if packed else " and batch"),
    )
    require(v.shape == k.shape, f"v: {list(v.shape)} differs from k {list(k.shape)}")
    num_kv_heads = k.shape[-2]
    require(
        num_kv_heads > 0 and num_heads % num_kv_heads == 0,
        f"k: num_kv_heads ({num_kv_heads}) must divide q's num_heads ({num_heads})",
    )
    require(out is None or out.shape == q.shape, f"out: expected {list(q.shape)} like q")
    for name, x in (("q", q), ("k", k), ("v", v), ("out", out)):
        if x is None:
            continue
        require_type(x.dtype == q.dtype, f"{name}: expected {q.dtype} like q, got {x.dtype}")
        require(x.stride(-1) == 1, f"{name}: head_dim must be contiguous, its stride is {x.stride(-1)}")
        steps = [step for size, step in zip(x.shape[:-1], x.stride()[:-1], strict=True) if size > 1]
        require(
            all(step > 0 and step * x.element_size() % 16 == 0 for step in steps) and x.data_ptr() % 16 == 0,
            f"{name}: strides must be positive multiples of 16 bytes and the start aligned to 16, got {x.stride()}",
        )
    require(scale is None or scale > 0, f"scale: expected a positive number, got {scale}")
    if cu_seqlens_q is None or cu_seqlens_k is None:
        return
    for name, x in (("cu_seqlens_q", cu_seqlens_q), ("cu_seqlens_k", cu_seqlens_k)):
        require_ints((torch.int32,), **{name: x})
        require(
            x.ndim == 1 and x.is_contiguous() and x.shape[0] >= 2 and x.shape == cu_seqlens_q.shape,
            f"{name}: expected [num_seqs + 1], contiguous, of one length for q and k, got {list(x.shape)}",
        )
