"""What lies between a decoder's matrix products, each in one launch: embedding, norms, rope with the cache write,
activation, greedy choice.

A matrix product may hand over its result as [parts, rows, n] float32 that is still to be summed over the parts; every
kernel here that reads one adds them up as it reads. Where the GPU can, kernels start early (kernels.early_start): what
they read before they wait is never the work of a kernel that started early itself (weights, and where a step's tokens
belong).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.early_start import early_options, let_next_start, wait_for_previous
from kernels.validate import FLOATS, require, require_caches, require_ints, require_tensors, require_type

ARGMAX_BLOCK = 2048


@triton.jit
def _sum_parts(ptr, mask, stride_part, PARTS: tl.constexpr):
    """The elements at ptr, summed over the parts, in float32."""
    total = tl.load(ptr, mask=mask, other=0.0).to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += tl.load(ptr + part * stride_part, mask=mask, other=0.0).to(tl.float32)
    return total


@triton.jit
def _embed_kernel(token_ptr, sampled_ptr, table_ptr, x_ptr, hidden, BLOCK: tl.constexpr):
    """Program = one token. Reads and writes `hidden` elements."""
    row = tl.program_id(0).to(tl.int64)
    token = tl.load(token_ptr + row).to(tl.int64)
    if token < 0:
        token = tl.load(sampled_ptr + (-1 - token)).to(tl.int64)
    column = tl.arange(0, BLOCK)
    x = tl.load(table_ptr + token * hidden + column, mask=column < hidden)  # (BLOCK,)
    tl.store(x_ptr + row * hidden + column, x, mask=column < hidden)


def embed(tokens: torch.Tensor, sampled: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Rows of an embedding, [num_tokens, hidden], some by tokens that only the device knows yet.

    tokens: [num_tokens] int32; -1 - i stands for sampled[i]. sampled: [rows] int32. table: [vocab_size, hidden],
    contiguous. Token ids are not read on the host, so one beyond the table is not checked.
    TypeError or ValueError, naming the argument.
    """
    require_tensors(tokens=tokens, sampled=sampled, table=table)
    require_ints((torch.int32,), tokens=tokens, sampled=sampled)
    require(tokens.ndim == 1 and tokens.is_contiguous(), f"tokens: expected [num_tokens], got {list(tokens.shape)}")
    require(table.ndim == 2 and table.is_contiguous(), "table: expected [vocab_size, hidden], contiguous")
    hidden = table.shape[1]
    x = table.new_empty((tokens.shape[0], hidden))
    if tokens.shape[0]:
        _embed_kernel[(tokens.shape[0],)](tokens, sampled, table, x, hidden, BLOCK=triton.next_power_of_2(hidden))
    return x


@triton.jit
def _rms_norm_kernel(
    x_ptr, residual_ptr, weight_ptr, y_ptr, total_ptr, hidden, eps, stride_part,
    PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program = one row: reads x (and the residual) once, writes y (and the sum)."""
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64) * hidden
    column = tl.arange(0, BLOCK)
    live = column < hidden
    weight = tl.load(weight_ptr + column, mask=live, other=0.0)  # (BLOCK,)
    wait_for_previous(EARLY)
    total = _sum_parts(x_ptr + row + column, live, stride_part, PARTS)  # (BLOCK,)
    if residual_ptr is not None:
        total += tl.load(residual_ptr + row + column, mask=live, other=0.0).to(tl.float32)
    if total_ptr is not None:
        rounded = total.to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row + column, rounded, mask=live)
        total = rounded.to(tl.float32)  # what the next layer adds to is what this norm saw
    scale = 1.0 / tl.sqrt(tl.sum(total * total, 0) / hidden + eps)
    tl.store(y_ptr + row + column, (total * scale * weight.to(tl.float32)).to(y_ptr.dtype.element_ty), mask=live)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """rms_norm(x + residual) * weight and the sum x + residual, both [rows, hidden] of weight's dtype.

    x: [rows, hidden] of weight's dtype, or [parts, rows, hidden] float32, contiguous. residual: [rows, hidden], or None
    for nothing to add; then the sum is x. weight: [hidden]. Computed in float32 from the rounded sum.
    TypeError or ValueError, naming the argument. Safe to capture in a CUDA graph.
    """
    rows, hidden = _check_parts(x, weight.shape[-1], weight.dtype)
    require_tensors(x=x, weight=weight, **({} if residual is None else {"residual": residual}))
    require(weight.ndim == 1 and weight.is_contiguous(), f"weight: expected [hidden], got {list(weight.shape)}")
    require(
        residual is None or (residual.shape == (rows, hidden) and residual.is_contiguous()),
        f"residual: expected [{rows}, {hidden}], contiguous",
    )
    y = weight.new_empty((rows, hidden))
    given = x.ndim == 2 and residual is None
    total = x if given else torch.empty_like(y)
    if rows:
        _rms_norm_kernel[(rows,)](
            x, residual, weight, y, None if given else total, hidden, eps, *_parts(x),
            BLOCK=triton.next_power_of_2(hidden), num_warps=8 if hidden > 2048 else 4,
            **early_options(x.device),
        )  # fmt: skip
    return y, total


@triton.jit
def _rope_write_kernel(
    qkv_ptr, q_norm_ptr, k_norm_ptr, rope_ptr, position_ptr, slot_ptr, q_ptr, k_cache_ptr, v_cache_ptr,
    num_heads, num_kv_heads, eps, stride_part, stride_row, stride_rope,
    stride_kb, stride_kt, stride_kh, stride_vb, stride_vt, stride_vh,
    HEAD_DIM: tl.constexpr, BLOCK_SIZE: tl.constexpr, PARTS: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (token, head): a query, key or value head, read once and written once to where it belongs."""
    HALF: tl.constexpr = HEAD_DIM // 2
    let_next_start(EARLY)
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    lane = tl.arange(0, HALF)
    live = lane < HALF
    at = qkv_ptr + row * stride_row + head * HEAD_DIM + lane
    slot = tl.load(slot_ptr + row).to(tl.int64)
    angle = rope_ptr + tl.load(position_ptr + row).to(tl.int64) * HEAD_DIM + lane
    cos = tl.load(angle).to(tl.float32)
    sin = tl.load(angle + stride_rope).to(tl.float32)
    wait_for_previous(EARLY)
    low = _sum_parts(at, live, stride_part, PARTS)  # (HALF,)
    high = _sum_parts(at + HALF, live, stride_part, PARTS)  # (HALF,)
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    if head >= num_heads + num_kv_heads:
        if slot >= 0:
            v_head = head - num_heads - num_kv_heads
            v_row = v_cache_ptr + block * stride_vb + offset * stride_vt + v_head * stride_vh + lane
            tl.store(v_row, low.to(v_cache_ptr.dtype.element_ty))
            tl.store(v_row + HALF, high.to(v_cache_ptr.dtype.element_ty))
        return
    if q_norm_ptr is not None:
        scale = 1.0 / tl.sqrt((tl.sum(low * low, 0) + tl.sum(high * high, 0)) / HEAD_DIM + eps)
        norm_ptr = q_norm_ptr
        if head >= num_heads:
            norm_ptr = k_norm_ptr
        low = low * scale * tl.load(norm_ptr + lane).to(tl.float32)
        high = high * scale * tl.load(norm_ptr + HALF + lane).to(tl.float32)
    turned_low = low * cos - high * sin
    turned_high = high * cos + low * sin
    if head < num_heads:
        q_row = q_ptr + (row * num_heads + head) * HEAD_DIM + lane
        tl.store(q_row, turned_low.to(q_ptr.dtype.element_ty))
        tl.store(q_row + HALF, turned_high.to(q_ptr.dtype.element_ty))
    elif slot >= 0:
        k_row = k_cache_ptr + block * stride_kb + offset * stride_kt + (head - num_heads) * stride_kh + lane
        tl.store(k_row, turned_low.to(k_cache_ptr.dtype.element_ty))
        tl.store(k_row + HALF, turned_high.to(k_cache_ptr.dtype.element_ty))


def rope_write(
    qkv: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    rope_table: torch.Tensor,
    positions: torch.Tensor,
    slot_mapping: torch.Tensor,
    num_heads: int,
    *,
    q_norm: torch.Tensor | None = None,
    k_norm: torch.Tensor | None = None,
    eps: float = 1e-6,
) -> torch.Tensor:
    """Norm and rotate the new tokens' q and k head by head; K and V go to the cache, and q is given back.

    qkv: [rows, (num_heads + 2 * num_kv_heads) * head_dim] of the cache's dtype, or [parts, rows, ...] float32,
        contiguous: all q heads, then k, then v. head_dim: a power of two.
    k_cache, v_cache, slot_mapping: as in kernels.kv_cache.write_kv; a negative slot writes nowhere.
    rope_table: [2, positions, head_dim], cos above sin, contiguous; halves of a head are rotated against each other.
    positions: [rows] int32. q_norm, k_norm: [head_dim], both or neither.

    Gives [rows, num_heads, head_dim]. TypeError or ValueError, naming the argument. Safe to capture in a CUDA graph.
    """
    num_kv_heads, head_dim = k_cache.shape[2:]
    rows, _ = _check_parts(qkv, (num_heads + 2 * num_kv_heads) * head_dim, k_cache.dtype, "qkv")
    norms = {} if q_norm is None or k_norm is None else {"q_norm": q_norm, "k_norm": k_norm}
    require((q_norm is None) == (k_norm is None), "q_norm: give q_norm and k_norm, or neither")
    require_tensors(
        qkv=qkv, k_cache=k_cache, v_cache=v_cache, rope_table=rope_table, positions=positions,
        slot_mapping=slot_mapping, **norms,
    )  # fmt: skip
    require_caches(k_cache, v_cache, k_cache.dtype, head_dim)
    require(head_dim & (head_dim - 1) == 0, f"k_cache: head_dim must be a power of two, got {head_dim}")
    for name, norm in norms.items():
        require(norm.shape == (head_dim,) and norm.is_contiguous(), f"{name}: expected [{head_dim}], contiguous")
    require_ints((torch.int32, torch.int64), positions=positions, slot_mapping=slot_mapping)
    for name, index in (("positions", positions), ("slot_mapping", slot_mapping)):
        require(index.shape == (rows,) and index.is_contiguous(), f"{name}: expected [{rows}], contiguous")
    require(
        rope_table.ndim == 3 and rope_table.shape[::2] == (2, head_dim) and rope_table.is_contiguous(),
        f"rope_table: expected [2, positions, {head_dim}], contiguous, got {list(rope_table.shape)}",
    )
    q = k_cache.new_empty((rows, num_heads, head_dim))
    if rows:
        stride_part, parts = _parts(qkv)
        _rope_write_kernel[(rows, num_heads + 2 * num_kv_heads)](
            qkv, q_norm, k_norm, rope_table, positions, slot_mapping, q, k_cache, v_cache, num_heads, num_kv_heads, eps,
            stride_part, qkv.stride(-2), rope_table.stride(0), *k_cache.stride()[:3], *v_cache.stride()[:3],
            HEAD_DIM=head_dim, BLOCK_SIZE=k_cache.shape[1], PARTS=parts, num_warps=1, **early_options(qkv.device),
        )  # fmt: skip
    return q


@triton.jit
def _silu_mul_kernel(x_ptr, y_ptr, n, stride_part, PARTS: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program (row, block of columns): reads 2 * BLOCK elements, writes BLOCK."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    live = column < n
    gate = _sum_parts(x_ptr + row * 2 * n + column, live, stride_part, PARTS)  # (BLOCK,)
    up = _sum_parts(x_ptr + row * 2 * n + n + column, live, stride_part, PARTS)  # (BLOCK,)
    tl.store(y_ptr + row * n + column, (gate * tl.sigmoid(gate) * up).to(y_ptr.dtype.element_ty), mask=live)


def silu_mul(gate_up: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """silu(gate) * up, [rows, n] of `dtype`. gate_up: [rows, 2 * n] of `dtype`, or [parts, rows, 2 * n] float32."""
    rows, wide = _check_parts(gate_up, gate_up.shape[-1], dtype, "gate_up")
    require_tensors(gate_up=gate_up)
    require(wide % 2 == 0, f"gate_up: expected as many gate as up columns, got {wide}")
    y = gate_up.new_empty((rows, wide // 2), dtype=dtype)
    if y.numel():
        grid = (rows, triton.cdiv(wide // 2, 1024))
        _silu_mul_kernel[grid](gate_up, y, wide // 2, *_parts(gate_up), BLOCK=1024, **early_options(y.device))
    return y


@triton.jit
def _best_of_block_kernel(
    logits_ptr, value_ptr, index_ptr, vocab, blocks, stride_row, BLOCK: tl.constexpr, EARLY: tl.constexpr
):
    """Program (row, block): the largest logit of the block, and the first place it stands."""
    let_next_start(EARLY)
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    column = block * BLOCK + tl.arange(0, BLOCK)
    logit = tl.load(logits_ptr + row * stride_row + column, mask=column < vocab, other=float("-inf")).to(tl.float32)
    best = tl.max(logit, 0)
    place = tl.min(tl.where(logit == best, column, vocab - 1), 0)
    tl.store(value_ptr + row * blocks + block, best)
    tl.store(index_ptr + row * blocks + block, place)


@triton.jit
def _best_of_all_kernel(value_ptr, index_ptr, out_ptr, vocab, blocks, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    """Program = one row: the best of its blocks."""
    wait_for_previous(EARLY)
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, BLOCK)
    value = tl.load(value_ptr + row * blocks + block, mask=block < blocks, other=float("-inf"))  # (BLOCK,)
    index = tl.load(index_ptr + row * blocks + block, mask=block < blocks, other=vocab - 1)  # (BLOCK,)
    place = tl.min(tl.where(value == tl.max(value, 0), index, vocab - 1), 0)
    tl.store(out_ptr + row, place.to(tl.int32))


def argmax(logits: torch.Tensor, out: torch.Tensor) -> None:
    """The place of each row's largest logit, the first of equal ones, into `out`; two launches.

    logits: [rows, vocab_size], vocab_size contiguous. out: [rows] int32. A row of NaN gives the last token.
    """
    require_tensors(logits=logits, out=out)
    require_type(logits.dtype in FLOATS, f"logits: expected float16, bfloat16 or float32, got {logits.dtype}")
    require(
        logits.ndim == 2 and logits.stride(1) == 1 and logits.shape[1] > 0,
        f"logits: expected [rows, vocab_size], vocab_size contiguous, got {list(logits.shape)}",
    )
    require_ints((torch.int32,), out=out)
    rows, vocab = logits.shape
    require(out.shape == (rows,) and out.is_contiguous(), f"out: expected [{rows}], contiguous, got {list(out.shape)}")
    if not rows:
        return
    blocks = triton.cdiv(vocab, ARGMAX_BLOCK)
    value = logits.new_empty((rows, blocks), dtype=torch.float32)
    index = logits.new_empty((rows, blocks), dtype=torch.int32)
    early = early_options(logits.device)
    _best_of_block_kernel[(rows, blocks)](
        logits, value, index, vocab, blocks, logits.stride(0), BLOCK=ARGMAX_BLOCK, **early
    )
    _best_of_all_kernel[(rows,)](value, index, out, vocab, blocks, BLOCK=triton.next_power_of_2(blocks), **early)


def _check_parts(x: torch.Tensor, n: int, dtype: torch.dtype, name: str = "x") -> tuple[int, int]:
    """Rows and columns of a product's result, whole or in parts."""
    require_type(isinstance(x, torch.Tensor), f"{name}: expected a tensor, got {type(x).__name__}")
    require(
        x.ndim in (2, 3) and x.shape[-1] == n and x.is_contiguous(),
        f"{name}: expected [rows, {n}] or [parts, rows, {n}], contiguous, got {list(x.shape)}",
    )
    require_type(dtype in FLOATS, f"dtype: expected float16, bfloat16 or float32, got {dtype}")
    wanted = dtype if x.ndim == 2 else torch.float32
    require_type(x.dtype == wanted, f"{name}: expected {wanted}, got {x.dtype}")
    return x.shape[-2], n


def _parts(x: torch.Tensor) -> tuple[int, int]:
    """The stride between parts, and how many there are."""
    return (x.stride(0), x.shape[0]) if x.ndim == 3 else (0, 1)
