# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
# ---

# %% [markdown]
# # Lab 2: FlashAttention in Triton
#
# Attention over a sequence of length N computes an N by N matrix of scores, which nobody needs once its rows are summed up. Written down
# naively, that matrix goes to memory and comes back twice, and at 16k tokens, with heads of 64, it is 64 times larger than queries, keys,
# values and results together. FlashAttention never writes it: it walks over keys and values in tiles and keeps three running values per row.
#
# You will write it from the first kernel on: a vector add, a softmax, the online softmax in plain torch, then FlashAttention with causal
# masks, grouped queries and ragged batches. On the way you count bytes, read machine code, remove bank conflicts and find five bugs with
# the tool that shows each. No GPU is needed: kernels run in Triton's interpreter, are compiled for GPUs that are not here, and are
# measured by what they ask for. With a GPU, the same checks run on it.

# %% readonly="setup"
import json
import math
from collections.abc import Callable
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
import torch
import triton
import triton.language as tl

import labkit
from labkit import compiled, device, meter, plots, races, tilewalk, widgets
from labkit.trials import Trial, Verdicts, nothing_to_show

DEVICE = device.name()
LOG2E = 1.4426950408889634
print(f"kernels run on: {device.tier()}")

# %% [markdown]
# ## 1. The first kernel: a tail mask
#
# A Triton kernel is a function that runs once per **program**. Each program works on a **tile**, here `BLOCK` consecutive elements, and
# finds its own with `tl.program_id`. The last tile hangs over the end of the vector: its **mask** says which lanes are real. A load
# without a mask reads whatever lies behind the tensor; on a GPU that may be another request's data, or nothing at all for a month and then
# a crash.
#
# *Predict:* how many bytes does adding two vectors of 1,000 fp32 numbers move?


# %% question="vector_add" points=1 hidden=1
@triton.jit
def vector_add_kernel(x_ptr, y_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Program i adds elements i * BLOCK to (i + 1) * BLOCK - 1, as far as they exist. n: length of all three vectors."""
    ### BEGIN SOLUTION
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)  # (BLOCK,)
    real = at < n
    tl.store(out_ptr + at, tl.load(x_ptr + at, mask=real) + tl.load(y_ptr + at, mask=real), mask=real)
    ### END SOLUTION


def vector_add(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """x + y for contiguous vectors of equal length, in their dtype."""
    out = torch.empty_like(x)
    BLOCK = 256
    vector_add_kernel[(triton.cdiv(x.numel(), BLOCK),)](x, y, out, x.numel(), BLOCK=BLOCK)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>tl.program_id(0)</code>, <code>tl.arange(0, BLOCK)</code>,
# <code>tl.load(pointers, mask=...)</code>.</details>
# <details><summary>Hint 2: the idea</summary>Indices first, then which of them are smaller than <code>n</code>; every access takes that
# mask.</details>
# <details><summary>Hint 3: the shape of the code</summary>Three lines: indices, mask, one store of the sum of two loads.</details>

# %%
try:
    x, y = torch.randn(1000, device=DEVICE), torch.randn(1000, device=DEVICE)
    print(meter.measure(vector_add, x, y))
except Exception as error:
    print(nothing_to_show(error, "question 1"))

# %% [markdown]
# ## 2. Softmax of a row, for any scores
#
# `softmax(s) = exp(s) / sum(exp(s))` overflows as soon as a score reaches 89 in fp32, or 12 in fp16, and scores of real models do.
# Subtracting the largest score of the row changes nothing mathematically and keeps every exponential at most 1.
#
# One program takes one row and keeps it on chip: it is read once and written once. A tile's length must be a power of two, so the row is
# padded: what stands in the padding must count neither for the maximum nor for the sum.


# %% question="row_softmax" points=2 hidden=2
@triton.jit
def row_softmax_kernel(x_ptr, out_ptr, x_stride, out_stride, n_cols, BLOCK: tl.constexpr):
    """Program i: softmax of row i, computed in fp32. BLOCK: a power of two, at least n_cols. Reads and writes the row once."""
    ### BEGIN SOLUTION
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    real = cols < n_cols
    x = tl.load(x_ptr + row * x_stride + cols, mask=real, other=float("-inf")).to(tl.float32)  # (BLOCK,)
    p = tl.exp(x - tl.max(x, axis=0))
    out = p / tl.sum(p, axis=0)
    tl.store(out_ptr + row * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask=real)
    ### END SOLUTION


def row_softmax(x: torch.Tensor) -> torch.Tensor:
    """Softmax over the last dimension of x [rows, cols]; its rows may be strided, its columns are contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    BLOCK = triton.next_power_of_2(x.shape[1])
    row_softmax_kernel[(x.shape[0],)](x, out, x.stride(0), out.stride(0), x.shape[1], BLOCK=BLOCK)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>tl.load(..., other=...)</code> says what masked lanes hold.</details>
# <details><summary>Hint 2: the idea</summary>Which value loses every maximum, and has exponential zero?</details>
# <details><summary>Hint 3: the shape of the code</summary>Row and columns, masked load with <code>other</code>, subtract the maximum,
# <code>tl.exp</code>, divide by the sum, masked store.</details>
#
# ## 3. The online softmax
#
# The row softmax needs the whole row. Attention rows are long and come tile by tile, so we need softmax **in pieces**. Let a piece of a row
# be summarised by
#
# $$ m = \max_j s_j, \qquad l = \sum_j e^{s_j - m}, \qquad o = \frac{1}{l} \sum_j e^{s_j - m} v_j . $$
#
# Two summaries of neighbouring pieces combine into that of both:
#
# $$ m = \max(m_1, m_2), \qquad l = l_1 e^{m_1 - m} + l_2 e^{m_2 - m}, \qquad o = \frac{l_1 e^{m_1 - m}\, o_1 + l_2 e^{m_2 - m}\, o_2}{l} . $$
#
# *Prove it on paper* before you write it: multiply both sides by $l\, e^{m}$ and see which sums remain. The operation is associative: pieces
# may be combined in any order, on any number of programs. An empty piece has $m = -\infty$, $l = 0$, and changes nothing; mind what
# $-\infty - (-\infty)$ is.


# %% question="merge_softmax" points=2 hidden=2
def merge_softmax(
    m1: torch.Tensor, l1: torch.Tensor, o1: torch.Tensor, m2: torch.Tensor, l2: torch.Tensor, o2: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Combine two summaries (m, l, o) of pieces of the same rows.

    m, l: [rows]. o: [rows, head_dim], zeros for an empty piece, whose m is -inf and l is 0. Returns (m, l, o) of both pieces together.
    By the formulas above: torch.softmax and torch.logsumexp lose digits where m is large, and are refused.
    """
    ### BEGIN SOLUTION
    m = torch.maximum(m1, m2)
    safe = torch.where(m == -math.inf, 0.0, m)  # both empty: -inf - 0 is -inf, and its exponential 0
    w1, w2 = l1 * torch.exp(m1 - safe), l2 * torch.exp(m2 - safe)
    l = w1 + w2
    o = (w1[:, None] * o1 + w2[:, None] * o2) / torch.where(l == 0, 1.0, l)[:, None]
    return m, l, o
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The two formulas; then the case of two empty pieces.</details>
# <details><summary>Hint 2: the idea</summary>Weights <code>l1 * exp(m1 - m)</code> and <code>l2 * exp(m2 - m)</code> serve both l and o.
# </details>
# <details><summary>Hint 3: the shape of the code</summary>Maximum; a version of it that is finite; two weights; their sum; weighted mean with
# a guarded division.</details>
#
# ## 4. FlashAttention, forward
#
# Program `(row tile, head)` holds a tile of queries `(BLOCK_M, HEAD_DIM)` and walks over keys and values in tiles of `BLOCK_N`. It keeps
# `m`, `l` and an **unnormalised** accumulator `acc` for each of its rows, all in fp32:
#
# ```
#   s     = scale * q k^T                      (BLOCK_M, BLOCK_N)
#   m_new = max(m, rowmax(s))                  alpha = exp(m - m_new)
#   p     = exp(s - m_new)
#   l     = l * alpha + rowsum(p)              acc   = acc * alpha + p v
# ```
#
# The score tile lives in registers and never reaches memory. Products of tiles are `tl.dot`, which takes two-dimensional tiles in 16 bits
# and sums in fp32; torch's own products are refused here. Hardware computes $2^x$, not $e^x$, so real kernels fold $\log_2 e$ into the scale and use `tl.exp2`; you may do either.
#
# *Predict:* with 512 queries and 512 keys of head_dim 64 in fp16, `BLOCK_M` 64: how many times is K read? So how many bytes?


# %% question="flash_forward" points=4 hidden=4 timeout=180
@triton.jit
def flash_forward_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, seq_q, seq_k,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, o_row_stride, o_head_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Program (i, head): rows i * BLOCK_M and on of one head. The stride along head_dim is 1; lengths need not divide by the tiles."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    dims = tl.arange(0, HEAD_DIM)  # (HEAD_DIM,)
    ### BEGIN SOLUTION
    q_at = q_ptr + head * q_head_stride + rows[:, None] * q_row_stride + dims[None, :]
    q = tl.load(q_at, mask=rows[:, None] < seq_q, other=0.0)  # (BLOCK_M, HEAD_DIM)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, seq_k, BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)  # (BLOCK_N,)
        real = cols < seq_k
        k_at = k_ptr + head * k_head_stride + cols[None, :] * k_row_stride + dims[:, None]
        k = tl.load(k_at, mask=real[None, :], other=0.0)  # (HEAD_DIM, BLOCK_N)
        s = tl.where(real[None, :], tl.dot(q, k) * scale, float("-inf"))  # (BLOCK_M, BLOCK_N)
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        v_at = v_ptr + head * v_head_stride + cols[:, None] * v_row_stride + dims[None, :]
        v = tl.load(v_at, mask=real[:, None], other=0.0)  # (BLOCK_N, HEAD_DIM)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    o_at = o_ptr + head * o_head_stride + rows[:, None] * o_row_stride + dims[None, :]
    tl.store(o_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < seq_q)
    ### END SOLUTION


def flash_forward(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block_m: int = 64, block_n: int = 64
) -> torch.Tensor:
    """Attention without a mask. q: [seq_q, heads, head_dim]; k, v: [seq_k, heads, head_dim], seq_k at least 1. Returns the shape of q."""
    o = torch.empty_like(q)
    seq_q, heads, head_dim = q.shape
    flash_forward_kernel[(triton.cdiv(seq_q, block_m), heads)](
        q, k, v, o, scale, seq_q, k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0), o.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=head_dim,
    )  # fmt: skip
    return o


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Question 3 with tiles: piece 1 is what you have, piece 2 is the tile at hand. The division
# by l waits until the end.</details>
# <details><summary>Hint 2: the idea</summary>Load K transposed, by swapping which index gets the new axis, so that <code>tl.dot(q, k)</code>
# works. A column past the end gets the score minus infinity. <code>p</code> goes to v's dtype for the second product.</details>
# <details><summary>Hint 3: the shape of the code</summary>Load q once; three running values; <code>for start in range(0, seq_k,
# BLOCK_N)</code>: columns, mask, k, s, m_new, alpha, p, l, v, acc; divide; masked store.</details>
#
# ## 5. Causal, and half the work
#
# A token attends to itself and to what stands before it. With as many queries as keys, row i sees columns 0 to i. If there are more keys than
# queries, the queries are the **last** ones (a chunk of a longer prompt): row i sees columns up to `i + seq_k - seq_q`.
#
# Masking alone gives the right result and saves nothing. A row tile whose last row sees column c never needs the key tiles past c: **skip them**.
# Then half of the tiles are never loaded, and that is what gets counted.


# %% question="flash_causal" points=4 hidden=3 timeout=180
@triton.jit
def flash_causal_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, seq_q, seq_k,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, o_row_stride, o_head_stride,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """As flash_forward_kernel, causal: row i attends to columns 0 .. i + seq_k - seq_q. Loads no key tile that no row of its tile needs."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    dims = tl.arange(0, HEAD_DIM)  # (HEAD_DIM,)
    ### BEGIN SOLUTION
    q_at = q_ptr + head * q_head_stride + rows[:, None] * q_row_stride + dims[None, :]
    q = tl.load(q_at, mask=rows[:, None] < seq_q, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    last_visible = (tl.program_id(0) + 1) * BLOCK_M - 1 + seq_k - seq_q
    for start in range(0, tl.minimum(seq_k, last_visible + 1), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        real = cols < seq_k
        k_at = k_ptr + head * k_head_stride + cols[None, :] * k_row_stride + dims[:, None]
        k = tl.load(k_at, mask=real[None, :], other=0.0)
        visible = real[None, :] & (cols[None, :] <= rows[:, None] + seq_k - seq_q)  # (BLOCK_M, BLOCK_N)
        s = tl.where(visible, tl.dot(q, k) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        v_at = v_ptr + head * v_head_stride + cols[:, None] * v_row_stride + dims[None, :]
        v = tl.load(v_at, mask=real[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    o_at = o_ptr + head * o_head_stride + rows[:, None] * o_row_stride + dims[None, :]
    tl.store(o_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < seq_q)
    ### END SOLUTION


def flash_causal(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block_m: int = 64, block_n: int = 64
) -> torch.Tensor:
    """Causal attention. Shapes as in question 4, with seq_k at least seq_q."""
    o = torch.empty_like(q)
    seq_q, heads, head_dim = q.shape
    flash_causal_kernel[(triton.cdiv(seq_q, block_m), heads)](
        q, k, v, o, scale, seq_q, k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0), o.stride(1),
        BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=head_dim,
    )  # fmt: skip
    return o


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Two changes to question 4: the mask of s, and the end of the loop.</details>
# <details><summary>Hint 2: the idea</summary>The last row of the tile sees furthest: column <code>last_row + seq_k - seq_q</code>. The loop may end
# there. The first key tile always has something to see, so no row's maximum stays at minus infinity.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>for start in range(0, tl.minimum(seq_k, last_visible + 1), BLOCK_N)</code> and a
# mask <code>cols &lt;= rows + seq_k - seq_q</code>.</details>

# %%
try:
    q, k, v = (torch.randn(512, 1, 64, dtype=torch.float16, device=DEVICE) for _ in "qkv")
    full, half = (meter.measure(f, q, k, v, 0.125) for f in (flash_forward, flash_causal))
    print(
        f"Q, K and V loaded: {full.bytes_loaded:,} bytes without a mask, {half.bytes_loaded:,} causal: {half.bytes_loaded / full.bytes_loaded:.0%}"
    )
except Exception as error:
    print(nothing_to_show(error, "questions 4 and 5"))

# %% [markdown]
# ## 6. Grouped queries, without a copy
#
# With grouped queries, `GROUP` query heads share one KV head. Repeating K and V for every query head gives the right answer and moves
# `GROUP` times the memory. The kernel needs no copy: it only has to look in the right place.
#
# Here, the queries of one group also have a common need: they read the same K and V. A program per `(row tile, query head)` reads them
# `GROUP` times, once each; the cache catches some of that. The kernel below is allowed to do so: what is graded is that no copy is made,
# and that key tiles past the diagonal are still skipped.


# %% question="flash_grouped" points=2 hidden=2 timeout=180
@triton.jit
def flash_grouped_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, seq_q, seq_k,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, o_row_stride, o_head_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """As flash_causal_kernel; query head h uses KV head h // GROUP."""
    head = tl.program_id(1)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,)
    dims = tl.arange(0, HEAD_DIM)  # (HEAD_DIM,)
    ### BEGIN SOLUTION
    kv_head = head // GROUP
    q_at = q_ptr + head * q_head_stride + rows[:, None] * q_row_stride + dims[None, :]
    q = tl.load(q_at, mask=rows[:, None] < seq_q, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    last_visible = (tl.program_id(0) + 1) * BLOCK_M - 1 + seq_k - seq_q
    for start in range(0, tl.minimum(seq_k, last_visible + 1), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        real = cols < seq_k
        k_at = k_ptr + kv_head * k_head_stride + cols[None, :] * k_row_stride + dims[:, None]
        k = tl.load(k_at, mask=real[None, :], other=0.0)
        visible = real[None, :] & (cols[None, :] <= rows[:, None] + seq_k - seq_q)
        s = tl.where(visible, tl.dot(q, k) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        v_at = v_ptr + kv_head * v_head_stride + cols[:, None] * v_row_stride + dims[None, :]
        v = tl.load(v_at, mask=real[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    o_at = o_ptr + head * o_head_stride + rows[:, None] * o_row_stride + dims[None, :]
    tl.store(o_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < seq_q)
    ### END SOLUTION


def flash_grouped(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, block_m: int = 64, block_n: int = 64
) -> torch.Tensor:
    """Causal attention with grouped queries. q: [seq_q, heads, head_dim]; k, v: [seq_k, kv_heads, head_dim], heads a multiple of kv_heads."""
    o = torch.empty_like(q)
    seq_q, heads, head_dim = q.shape
    flash_grouped_kernel[(triton.cdiv(seq_q, block_m), heads)](
        q, k, v, o, scale, seq_q, k.shape[0],
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0), o.stride(1),
        GROUP=heads // k.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=head_dim,
    )  # fmt: skip
    return o


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Question 5 with one new line.</details>
# <details><summary>Hint 2: the idea</summary>Heads 0 to GROUP - 1 use KV head 0, the next ones KV head 1. Only K and V move; q and o keep their
# own head.</details>
# <details><summary>Hint 3: the shape of the code</summary><code>kv_head = head // GROUP</code>, used in two addresses.</details>
#
# ## 7. Ragged batches
#
# Requests have different lengths, and padding them to the longest can double the work. Instead, sequences are **packed** one behind the
# other, and `cu_seqlens` says where each begins: sequence `b` has rows `cu_seqlens[b]` to `cu_seqlens[b + 1] - 1`.
#
# The grid has a program for every `(row tile, head, sequence)` that the longest sequence needs. Most have no rows of a short sequence and
# leave at once. A sequence may be empty.


# %% question="flash_varlen" points=3 hidden=3 timeout=180
@triton.jit
def flash_varlen_kernel(
    q_ptr, k_ptr, v_ptr, o_ptr, cu_seqlens_ptr, scale,
    q_row_stride, q_head_stride, k_row_stride, k_head_stride, v_row_stride, v_head_stride, o_row_stride, o_head_stride,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    """Program (i, head, b): row tile i of sequence b, causal. A tile past the sequence's end does nothing.

    As before, loads no key tile that no row of its tile needs.
    """
    head = tl.program_id(1)
    begin = tl.load(cu_seqlens_ptr + tl.program_id(2))
    length = tl.load(cu_seqlens_ptr + tl.program_id(2) + 1) - begin
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)  # (BLOCK_M,), counted from the sequence's first
    dims = tl.arange(0, HEAD_DIM)  # (HEAD_DIM,)
    ### BEGIN SOLUTION
    if tl.program_id(0) * BLOCK_M >= length:
        return
    kv_head = head // GROUP
    q_at = q_ptr + head * q_head_stride + (begin + rows[:, None]) * q_row_stride + dims[None, :]
    q = tl.load(q_at, mask=rows[:, None] < length, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    for start in range(0, tl.minimum(length, (tl.program_id(0) + 1) * BLOCK_M), BLOCK_N):
        cols = start + tl.arange(0, BLOCK_N)
        real = cols < length
        k_at = k_ptr + kv_head * k_head_stride + (begin + cols[None, :]) * k_row_stride + dims[:, None]
        k = tl.load(k_at, mask=real[None, :], other=0.0)
        visible = real[None, :] & (cols[None, :] <= rows[:, None])
        s = tl.where(visible, tl.dot(q, k) * scale, float("-inf"))
        m_new = tl.maximum(m, tl.max(s, axis=1))
        alpha = tl.exp(m - m_new)
        p = tl.exp(s - m_new[:, None])
        l = l * alpha + tl.sum(p, axis=1)
        v_at = v_ptr + kv_head * v_head_stride + (begin + cols[:, None]) * v_row_stride + dims[None, :]
        v = tl.load(v_at, mask=real[:, None], other=0.0)
        acc = acc * alpha[:, None] + tl.dot(p.to(v.dtype), v)
        m = m_new
    o_at = o_ptr + head * o_head_stride + (begin + rows[:, None]) * o_row_stride + dims[None, :]
    tl.store(o_at, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < length)
    ### END SOLUTION


def flash_varlen(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens: torch.Tensor, max_seqlen: int, scale: float,
    block_m: int = 32, block_n: int = 32,
) -> torch.Tensor:  # fmt: skip
    """Causal attention within each of several packed sequences.

    q: [total, heads, head_dim]; k, v: [total, kv_heads, head_dim]. cu_seqlens: [num_seqs + 1] int32, from 0 to total, not decreasing.
    max_seqlen: the longest sequence, at least 1.
    """
    o = torch.empty_like(q)
    _, heads, head_dim = q.shape
    flash_varlen_kernel[(triton.cdiv(max_seqlen, block_m), heads, len(cu_seqlens) - 1)](
        q, k, v, o, cu_seqlens, scale,
        q.stride(0), q.stride(1), k.stride(0), k.stride(1), v.stride(0), v.stride(1), o.stride(0), o.stride(1),
        GROUP=heads // k.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=head_dim,
    )  # fmt: skip
    return o


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Rows and columns count from the sequence's first; addresses from the tensor's.</details>
# <details><summary>Hint 2: the idea</summary>Add <code>begin</code> to every row and column index inside an address, and nowhere else. The mask is
# about <code>length</code>: without it a tile runs on into the next sequence, which is real memory and gives no error.</details>
# <details><summary>Hint 3: the shape of the code</summary>Return early; then question 6 with <code>begin</code> in four addresses and
# <code>length</code> for both lengths.</details>
#
# ### The tiles, one by one
#
# The widget walks the tiles of such a kernel over a small causal example: which tile is loaded, which are skipped, and what `m`, `l` and `acc` hold
# after each. Watch `l` when a larger maximum arrives: what was summed before shrinks by alpha.

# %%
tile_walk = tilewalk.walk(seq_len=12, block_m=4, block_n=4, causal=True)
widgets.tile_stepper(tile_walk)

# %%
plots.tile_map(tile_walk)
plt.show()

# %% [markdown]
# ## 8. Numbers that stop growing
#
# Why is the accumulator fp32? Count ones. A running sum in a format with a $t$-bit significand stops growing at $2^t$: the next number
# that it could hold is 2 away, and adding 1 rounds back. `stall_point` finds where, by doing it.
#
# *Predict:* for fp16 (11 bits), bf16 (8 bits) and fp32 (24 bits).


# %% question="stall_point" points=1 hidden=1
def stall_point(dtype: torch.dtype) -> int:
    """The value at which a running sum of ones in `dtype` stops growing, found by adding, for 16-bit types, fp32 and fp64.

    Adding one by one takes 16 million steps in fp32: from a sum of 2**k, check whether adding 1 still changes it.
    The check also rounds torch's results to widths of its own: to formats that no table has.
    """
    ### BEGIN SOLUTION
    total = torch.tensor(1.0, dtype=dtype)
    one = torch.tensor(1.0, dtype=dtype)
    while total + one != total:
        total = total * 2
    return int(total)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>total + one != total</code>, with both in <code>dtype</code>.</details>
# <details><summary>Hint 2: the idea</summary>Powers of two are exact in every binary format. The first one that swallows a 1 is where a running sum
# stops.</details>
# <details><summary>Hint 3: the shape of the code</summary>Double while adding one still changes the sum.</details>

# %% [markdown]
# ## 9. The cost of a wrong base
#
# GPUs have one instruction for $2^x$ and none for $e^x$: $e^x = 2^{x \log_2 e}$, a multiplication each time. A kernel multiplies its scores by
# `scale` anyway, so it multiplies by `scale * log2(e)` instead and uses `exp2` everywhere: the same softmax, one multiplication fewer for
# each score. Who forgets the factor computes a softmax in base 2: every row sums to 1, everything looks right, and the model is a bit
# dumber. So look at the values, not at the sum.


# %% question="softmax_base2" points=1 hidden=1
def softmax_base2(scores: torch.Tensor, scale: float) -> torch.Tensor:
    """softmax(scale * scores) over the last dimension in fp32, with torch.exp2 as the only exponential and one multiplication a score.

    scores: [..., cols] in any float dtype. Safe for scores of several hundred.
    """
    ### BEGIN SOLUTION
    s = scores.float() * (scale * LOG2E)
    p = torch.exp2(s - s.amax(dim=-1, keepdim=True))
    return p / p.sum(dim=-1, keepdim=True)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary><code>LOG2E</code> from the setup cell.</details>
# <details><summary>Hint 2: the idea</summary>Fold the two constants before they meet the tensor. The maximum is taken in the same base.</details>
# <details><summary>Hint 3: the shape of the code</summary>Multiply, subtract the row's maximum, <code>exp2</code>, divide.</details>
#
# The cell below puts both to the test: attention of one query over 16,384 keys, summed in fp16 and in fp32, with base e and base 2.

# %%
try:
    torch.manual_seed(0)
    s, v = torch.randn(16384), torch.rand(16384)
    p = torch.exp(s - s.max())
    exact = (p.double() @ v.double() / p.double().sum()).item()
    half_sum = torch.zeros((), dtype=torch.float16)
    for chunk in p.half().view(-1, 64):  # a running sum in fp16, 64 at a time
        half_sum = half_sum + chunk.sum()
    forgotten = torch.exp2(s - s.max())
    print(
        f"a running sum of ones stops at {stall_point(torch.float16):,} in fp16, {stall_point(torch.bfloat16):,} in bf16"
    )
    print(f"the sum of exponentials is {p.double().sum():.1f}, in fp16 {half_sum.item():.1f}")
    print(
        f"the output is {exact:.6f}; with exp2 and log2(e) {(softmax_base2(s, 1.0) @ v).item():.6f}; without log2(e) {(forgotten @ v / forgotten.sum()).item():.6f}"
    )
    print(
        f"the largest weight is {softmax_base2(s, 1.0).max():.6f}; without log2(e) {(forgotten / forgotten.sum()).max():.6f}"
    )
except NotImplementedError:
    print("solve questions 8 and 9 first")

# %% [markdown]
# ## 10. What fits on a multiprocessor
#
# A program's tiles live in **registers** and **shared memory**, and a multiprocessor has a fixed amount of both. How many programs run on it
# at once follows from four limits (an H100 or H200, sm_90):
#
# | limit | of a multiprocessor | a program takes |
# |---|---|---|
# | registers | 4 parts of 16,384 | each of its warps 32 * registers a thread, rounded up to a multiple of 8 a thread, within one part |
# | shared memory | 233,472 bytes | what the kernel uses, plus 1,024, rounded up to a multiple of 128 |
# | warps | 64 | num_warps |
# | programs | 32 | 1 |
#
# **Occupancy** is the share of the 64 warps in use. High occupancy hides latency; but a FlashAttention program lives on large tiles, and large
# tiles take registers. Look at the numbers before you believe that more is better.


# %% question="programs_per_sm" points=1 hidden=1
def programs_per_sm(registers: int, shared_bytes: int, num_warps: int) -> int:
    """How many programs of a kernel one sm_90 multiprocessor runs at once.

    registers: a thread's, as the compiler reports it. shared_bytes: a program's.

    255 registers and 4 warps: a warp takes 32 * 256 = 8,192 registers, a part holds 2 warps, 4 parts hold 8, so 2 programs.
    """
    ### BEGIN SOLUTION
    warps_by_registers = 4 * (16384 // (32 * 8 * math.ceil(registers / 8)))
    by_registers = warps_by_registers // num_warps
    by_shared = 233472 // (128 * math.ceil((shared_bytes + 1024) / 128))
    return min(by_registers, by_shared, 64 // num_warps, 32)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The table has four rows.</details>
# <details><summary>Hint 2: the idea</summary>Each limit alone allows so many programs; the tightest decides.</details>
# <details><summary>Hint 3: the shape of the code</summary>Count warps first where the limit is about warps; then a <code>min</code>.</details>
#
# ## 11. Choose a configuration
#
# A kernel comes in many configurations: tile sizes, warps, pipeline stages. Larger tiles reuse what they load more often: a tile of `BLOCK_M`
# rows uses each loaded K and V `BLOCK_M` times. But too large a tile **spills** registers to memory, or does not fit at all. The compiler tells
# you all that without a GPU, in about a second.
#
# Choose under stated limits: no spills, at least `min_programs` programs on a multiprocessor; of what is left, the most reuse, `block_m`; of
# equals, the most programs; of equals, the first.


# %% question="choose_config" points=2 hidden=2
def choose_config(candidates: list[dict], report: Callable[[dict], object], min_programs: int) -> dict:
    """The best of `candidates` under the limits above.

    candidates: dicts with block_m, block_n, num_warps, num_stages. report(candidate): compiles it and gives an object with registers,
    spills (bytes) and shared_bytes, or raises RuntimeError if it does not compile. Call it once for each candidate: it takes a second.
    ValueError if no candidate is within the limits.
    """
    ### BEGIN SOLUTION
    best, best_key = None, None
    for candidate in candidates:
        try:
            got = report(candidate)
        except RuntimeError:
            continue
        programs = by_limits(got.registers, got.shared_bytes, candidate["num_warps"])
        key = (candidate["block_m"], programs)
        if not got.spills and programs >= min_programs and (best_key is None or key > best_key):
            best, best_key = candidate, key
    if best is None:
        raise ValueError(f"no candidate runs {min_programs} programs a multiprocessor without spills")
    return best


def by_limits(registers: int, shared_bytes: int, num_warps: int) -> int:
    """Question 10 again: a question stands on its own."""
    warps = 4 * (16384 // (32 * 8 * math.ceil(registers / 8)))
    return min(warps // num_warps, 233472 // (128 * math.ceil((shared_bytes + 1024) / 128)), 64 // num_warps, 32)


### END SOLUTION

# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Three sieves, then an order with two keys.</details>
# <details><summary>Hint 2: the idea</summary>Compare tuples <code>(block_m, programs)</code>; a strict comparison keeps the first of equals.
# </details>
# <details><summary>Hint 3: the shape of the code</summary>A loop with <code>try</code>; skip what does not compile, spills, or is too big;
# keep the best so far.</details>
#
# Run it on your own FlashAttention, compiled for a Hopper GPU that need not be here (a few seconds).


# %%
def flash_report(config: dict) -> compiled.Compiled:
    """What the compiler says of flash_causal with this configuration, for a Hopper GPU; nothing runs."""
    q, k, v = (torch.empty(4096, 16, 128, dtype=torch.float16) for _ in "qkv")
    call = meter.Call(flash_causal, (q, k, v, 0.088), {"block_m": config["block_m"], "block_n": config["block_n"]})
    [report] = compiled.compile_call(call, arch="sm_90")
    return report


try:
    print(f"{'tile':>10}{'registers':>11}{'spills':>8}{'shared':>9}{'wgmma':>7}{'copies':>8}   occupancy")
    for block_m, block_n in ((64, 32), (64, 64), (64, 128), (128, 64), (128, 128)):
        got = flash_report({"block_m": block_m, "block_n": block_n})
        kinds = got.instructions
        print(
            f"{block_m:>6}x{block_n:<4}{got.registers:>10}{got.spills:>8}{got.shared:>9,}{kinds['wgmma']:>7}{kinds['async_copy']:>8}   {got.occupancy}"
        )
except Exception as error:
    print(nothing_to_show(error, "question 5"))

# %% [markdown]
# *Explain:* none of them comes near full occupancy, and the fast kernel of section 20 runs 9 or 13 of 64 warps. Why is that no contradiction?
# (What does a multiprocessor do while a `wgmma` runs? How many loads are under way?)

# %% [markdown]
# ## 12. Banks
#
# Shared memory has 32 **banks**, each 4 bytes wide: the word at byte address `a` is in bank `(a // 4) % 32`. A warp's 32 lanes are served at
# once if they ask for words in different banks, or for the very same word. Two different words of one bank take two turns. The number of
# **conflicts** of an access is the number of extra turns: the most different words that any bank is asked for, minus one.
#
# Take a tile of 32 by 32 fp32 numbers, row after row. A row is 128 bytes, so one row covers all banks once. Reading a *row* has no conflict.
# Reading a *column*, as every transposed access does: all 32 words are in one bank.


# %% question="count_conflicts" points=1 hidden=1
def count_conflicts(addresses: list[int]) -> int:
    """Extra turns that one shared-memory access of a warp takes.

    addresses: the byte address of each lane's 4-byte word, multiples of 4. Lanes that read the same word share a turn.

    Lanes at 0, 128, 128 and 4: bank 0 is asked for two different words, so 1.
    """
    ### BEGIN SOLUTION
    words: dict[int, set[int]] = {}
    for address in addresses:
        words.setdefault(address // 4 % 32, set()).add(address // 4)
    return max(map(len, words.values())) - 1
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Group lanes by bank; count what differs within a bank.</details>
# <details><summary>Hint 2: the idea</summary>A set of words for each bank.</details>
# <details><summary>Hint 3: the shape of the code</summary>A dictionary from bank to set; the largest set's size, less one.</details>
#
# ## 13. Swizzling
#
# Padding each row by a word cures the column read and costs memory, and it breaks the alignment that 16-byte accesses need. **Swizzling**
# costs nothing: within row `r`, groups of `vec` neighbouring elements trade places by an exclusive or with the row's *phase*:
#
# $$ \mathrm{phase}(r) = r \bmod \mathrm{max\_phase}, \qquad \mathrm{group}' = \mathrm{group} \oplus \mathrm{phase}(r) . $$
#
# It is what the compiler picks for you (`vec` 8, `max_phase` 8 for 16-bit tiles on sm_80), and what Gluon lets you choose.


# %% question="swizzled_address" points=2 hidden=1
def swizzled_address(row: int, col: int, vec: int, max_phase: int, cols: int = 32) -> int:
    """Byte address of element (row, col) of a tile of fp32 with `cols` columns, swizzled in groups of `vec` elements.

    cols, vec and max_phase are powers of two, and there are at least max_phase groups in a row. max_phase 1 means no swizzle.

    Row 1, column 0, vec 4, max_phase 8: group 0 becomes group 1, so the element stands at 128 + 16 = 144.
    """
    ### BEGIN SOLUTION
    group, inside = col // vec, col % vec
    return 4 * (row * cols + (group ^ row % max_phase) * vec + inside)
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The formula; which part of the address does it change?</details>
# <details><summary>Hint 2: the idea</summary>Split the column into group and place inside it; exchange the group; put the address together.</details>
# <details><summary>Hint 3: the shape of the code</summary>Two integer operations, an exclusive or, one sum. In Python <code>^</code> binds
# looser than <code>%</code>.</details>

# %%
try:
    for name, vec, max_phase in (("not swizzled", 1, 1), ("vec 4, max_phase 8", 4, 8), ("vec 1, max_phase 32", 1, 32)):
        row_read = count_conflicts([swizzled_address(5, lane, vec, max_phase) for lane in range(32)])
        column_read = count_conflicts([swizzled_address(lane, 5, vec, max_phase) for lane in range(32)])
        print(f"{name:<20} reading a row: {row_read:>2} conflicts, a column: {column_read:>2}")
except NotImplementedError:
    print("solve questions 12 and 13 first")

# %% [markdown]
# The compiler can count too: Gluon, Triton's lower level, names both layouts, which thread holds which element and where each element
# lies. Below, the transposed read of a 64 by 64 tile of fp16 as it is compiled for sm_80. The middle line is the layout that Triton picks for
# you.

# %%
try:
    from triton.experimental.gluon import language as gl

    from labkit import bank_conflicts

    transposed = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])  # lane i reads element (i, j) of a column
    for name, vec, max_phase in (("not swizzled", 1, 1), ("vec 8, max_phase 8", 8, 8), ("vec 1, max_phase 32", 1, 32)):
        shared = gl.SwizzledSharedLayout(vec=vec, per_phase=1, max_phase=max_phase, order=[1, 0])
        print(f"{name:<20} {bank_conflicts.count_conflicts(transposed, shared, (64, 64)):>2} conflicts")
except ImportError as error:
    print(f"not here: {error}")

# %% [markdown]
# ## Bug hunt: five faults, five tools
#
# Each kernel below is in the state in which a colleague left it: its tests pass. Each has one fault, which a different tool shows. Find it, then
# write the corrected kernel and wrapper under the new name. `docs/debugging.md` says which tool finds which fault.
#
# | kernel | symptom | tool |
# |---|---|---|
# | `row_max` | wrong on some batches only | interpreter: print the tile |
# | `scale_rows` | wrong on slices of a larger tensor | compare with torch on a strided input |
# | `sum_of_squares` | right for short rows | derived tolerance: error against a same-precision reference |
# | `running_total` | right in the interpreter, wrong on a GPU | `meter.measure_many(..., shuffle=seed)`: another order of programs |
# | `differences` | right, and crashes once a month | `meter.measure(...).outside` |


# %% readonly="broken_kernels"
@triton.jit
def row_max_kernel(x_ptr, out_ptr, x_stride, n_cols, BLOCK: tl.constexpr):
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + tl.program_id(0), tl.max(x, axis=0))


def row_max(x: torch.Tensor) -> torch.Tensor:
    """The largest element of each row of x [rows, cols]."""
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    row_max_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def scale_rows_kernel(x_ptr, factor_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    at = row * n_cols + cols
    x = tl.load(x_ptr + at, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + at, x * tl.load(factor_ptr + row), mask=cols < n_cols)


def scale_rows(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Row i of x [rows, cols] times factor[i]. Rows of x may be strided; columns are contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    scale_rows_kernel[(x.shape[0],)](x, factor, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


@triton.jit
def sum_of_squares_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), x_ptr.dtype.element_ty)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0)
        total += x * x
    tl.store(out_ptr + row, tl.sum(total.to(tl.float32), axis=0))


def sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row of x [rows, cols], contiguous, in fp32."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    sum_of_squares_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
    return out


@triton.jit
def running_total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    before = tl.load(out_ptr + start - 1, mask=start > 0, other=0.0)  # the last total of the block before
    tl.store(out_ptr + at, before + tl.cumsum(x, axis=0), mask=at < n)


def running_total(x: torch.Tensor) -> torch.Tensor:
    """Running total of a vector of fp32."""
    out = torch.zeros_like(x)
    running_total_kernel[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32)
    return out


@triton.jit
def differences_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    following = tl.load(x_ptr + at + 1, mask=at < n, other=0.0)
    tl.store(out_ptr + at, following - x, mask=at < n - 1)


def differences(x: torch.Tensor) -> torch.Tensor:
    """x[i + 1] - x[i] for a vector x of at least two elements: one element less than x."""
    out = torch.empty(x.numel() - 1, dtype=x.dtype, device=x.device)
    differences_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


# %% [markdown]
# ### 14. `row_max`


# %% question="fixed_row_max" points=1 hidden=1
@triton.jit
def fixed_row_max_kernel(x_ptr, out_ptr, x_stride, n_cols, BLOCK: tl.constexpr):
    """Program i: the largest element of row i, whatever its sign."""
    ### BEGIN SOLUTION
    cols = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + tl.program_id(0) * x_stride + cols, mask=cols < n_cols, other=float("-inf"))
    tl.store(out_ptr + tl.program_id(0), tl.max(x, axis=0))
    ### END SOLUTION


def fixed_row_max(x: torch.Tensor) -> torch.Tensor:
    """The largest element of each row of x [rows, cols]."""
    out = torch.empty(x.shape[0], dtype=x.dtype, device=x.device)
    fixed_row_max_kernel[(x.shape[0],)](x, out, x.stride(0), x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>What do the lanes past n_cols hold?</details>
# <details><summary>Hint 2: the idea</summary>A row of negative numbers, of a length that is no power of two.</details>
# <details><summary>Hint 3: the shape of the code</summary>One argument of one load.</details>
#
# ### 15. `scale_rows`


# %% question="fixed_scale_rows" points=1 hidden=1
@triton.jit
def fixed_scale_rows_kernel(x_ptr, factor_ptr, out_ptr, x_stride, out_stride, n_cols, BLOCK: tl.constexpr):
    """Program i: row i of x times factor[i]; rows are x_stride and out_stride elements apart."""
    ### BEGIN SOLUTION
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n_cols, other=0.0)
    tl.store(out_ptr + row * out_stride + cols, x * tl.load(factor_ptr + row), mask=cols < n_cols)
    ### END SOLUTION


def fixed_scale_rows(x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
    """Row i of x [rows, cols] times factor[i]. Rows of x may be strided; columns are contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    BLOCK = triton.next_power_of_2(x.shape[1])
    fixed_scale_rows_kernel[(x.shape[0],)](x, factor, out, x.stride(0), out.stride(0), x.shape[1], BLOCK=BLOCK)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>How far apart are two rows of <code>big[:, :50]</code>?</details>
# <details><summary>Hint 2: the idea</summary>The number of columns and the distance of rows are two things.</details>
# <details><summary>Hint 3: the shape of the code</summary>Two addresses, each with its own stride.</details>
#
# ### 16. `sum_of_squares`


# %% question="fixed_sum_of_squares" points=1 hidden=1
@triton.jit
def fixed_sum_of_squares_kernel(x_ptr, out_ptr, n_cols, BLOCK: tl.constexpr):
    """Program i: the sum of squares of row i, as exact as fp32 allows."""
    ### BEGIN SOLUTION
    row = tl.program_id(0)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, n_cols, BLOCK):
        cols = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * n_cols + cols, mask=cols < n_cols, other=0.0).to(tl.float32)
        total += x * x
    tl.store(out_ptr + row, tl.sum(total, axis=0))
    ### END SOLUTION


def fixed_sum_of_squares(x: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row of x [rows, cols], contiguous, in fp32."""
    out = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    fixed_sum_of_squares_kernel[(x.shape[0],)](x, out, x.shape[1], BLOCK=64)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>In which dtype is each value of the loop?</details>
# <details><summary>Hint 2: the idea</summary>300 squared is infinite in fp16, and question 8 said where its sums stop.</details>
# <details><summary>Hint 3: the shape of the code</summary>Convert before you square.</details>
#
# ### 17. `running_total`


# %% question="fixed_running_total" points=2 hidden=1
@triton.jit
def fixed_running_total_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Program i: running totals of elements i * BLOCK and on, reading nothing that another program writes."""
    ### BEGIN SOLUTION
    start = tl.program_id(0) * BLOCK
    at = start + tl.arange(0, BLOCK)
    before = 0.0
    for earlier in range(0, start, BLOCK):  # every element before ours is real
        before += tl.sum(tl.load(x_ptr + earlier + tl.arange(0, BLOCK)), axis=0)
    x = tl.load(x_ptr + at, mask=at < n, other=0.0)
    tl.store(out_ptr + at, before + tl.cumsum(x, axis=0), mask=at < n)
    ### END SOLUTION


def fixed_running_total(x: torch.Tensor) -> torch.Tensor:
    """Running total of a vector of fp32."""
    out = torch.empty_like(x)
    fixed_running_total_kernel[(triton.cdiv(x.numel(), 32),)](x, out, x.numel(), BLOCK=32)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>Who writes what <code>before</code> reads, and when?</details>
# <details><summary>Hint 2: the idea</summary>Programs run in any order, at once. A program may read what was there before the launch, and nothing
# else: it can add up the earlier elements itself.</details>
# <details><summary>Hint 3: the shape of the code</summary>A loop over the blocks before one's own, summing x; then as before.</details>
#
# ### 18. `differences`


# %% question="fixed_differences" points=1 hidden=1
@triton.jit
def fixed_differences_kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Program i: differences i * BLOCK and on; n is the length of x. Touches no element outside x and out."""
    ### BEGIN SOLUTION
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    real = at < n - 1
    x = tl.load(x_ptr + at, mask=real, other=0.0)
    following = tl.load(x_ptr + at + 1, mask=real, other=0.0)
    tl.store(out_ptr + at, following - x, mask=real)
    ### END SOLUTION


def fixed_differences(x: torch.Tensor) -> torch.Tensor:
    """x[i + 1] - x[i] for a vector x of at least two elements: one element less than x."""
    out = torch.empty(x.numel() - 1, dtype=x.dtype, device=x.device)
    fixed_differences_kernel[(triton.cdiv(x.numel(), 64),)](x, out, x.numel(), BLOCK=64)
    return out


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>The last lane of the last program.</details>
# <details><summary>Hint 2: the idea</summary>A load of <code>at + 1</code> needs a mask about <code>at + 1</code>.</details>
# <details><summary>Hint 3: the shape of the code</summary>One mask for all three accesses.</details>
#
# ## 19. The race, read
#
# On a GPU the next cell races your kernel against PyTorch's backends on this machine. Without one, read a recorded race: each row has a case,
# whether higher or lower is better, our figure and the peers'. A single number hides the shape on which a kernel loses; so read two: the
# geometric mean of the ratios, and the worst case by name.


# %% question="read_race" points=2 hidden=1
def read_race(rows: list[dict], peer: str) -> tuple[float, str, float]:
    """How ours compares with `peer`: (geometric mean of the ratios, name of the worst case, its ratio).

    rows: [{"case": str, "better": "higher" | "lower", "ours": float, "peers": {name: float}}]. A ratio above 1 means that ours is better,
    whichever way the unit counts. Rows without this peer do not count. ValueError, naming the peer, if no row has it.
    """
    ### BEGIN SOLUTION
    ratios = {}
    for row in rows:
        if peer in row["peers"]:
            ratio = row["ours"] / row["peers"][peer]
            ratios[row["case"]] = ratio if row["better"] == "higher" else 1 / ratio
    if not ratios:
        raise ValueError(f"no row has the peer {peer!r}")
    worst = min(ratios, key=ratios.__getitem__)
    return math.exp(sum(map(math.log, ratios.values())) / len(ratios)), worst, ratios[worst]
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>TFLOP/s and microseconds count in opposite directions.</details>
# <details><summary>Hint 2: the idea</summary>One ratio a row, turned so that above 1 is good; then mean of logs, and minimum.</details>
# <details><summary>Hint 3: the shape of the code</summary>A dictionary from case to ratio; refuse if empty; <code>exp(mean(log))</code>;
# <code>min</code> by value.</details>


# %%
def race_here() -> races.Race:
    """Your causal kernel beside PyTorch's backends, each named: what SDPA picks by default differs from GPU to GPU."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    q, k, v = (torch.randn(4096, 16, 64, dtype=torch.float16, device="cuda") for _ in "qkv")
    packed = [x.transpose(0, 1)[None] for x in (q, k, v)]

    def sdpa(backend):
        with sdpa_kernel(backend):
            return torch.nn.functional.scaled_dot_product_attention(*packed, is_causal=True)

    contestants = {"yours": lambda: flash_causal(q, k, v, 0.125, 128, 64)}
    for name, backend in (("FlashAttention 2", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        contestants[name] = lambda backend=backend: sdpa(backend)
    return races.race(contestants, baseline="FlashAttention 2")


def recorded_race(benchmark: str = "flash_attention") -> list[dict]:
    """The rows of the run recorded on an NVIDIA H200."""
    return json.loads((Path(labkit.__file__).parent / "evidence" / f"{benchmark}.nvidia-h200.json").read_text())["rows"]


try:
    if device.tier() == "cuda":
        raced = race_here()
        print(raced)
        plots.race_chart(raced)
        plt.show()
    else:
        for variant in ("tl", "hopper"):
            rows = [row for row in recorded_race() if row["variant"] == variant]
            for peer in sorted({peer for row in rows for peer in row["peers"]}):
                mean, worst, ratio = read_race(rows, peer)
                print(
                    f"{variant:<7}against {peer:<10}{mean:5.2f}x on the geometric mean, {ratio:.2f}x at worst: {worst}"
                )
except Exception as error:
    print(nothing_to_show(error, "question 5" if device.tier() == "cuda" else "question 19"))

# %% [markdown]
# ## 20. A tour of Hopper, with one exercise
#
# `kernels/flash_attention_hopper.py` computes the same thing on a Hopper GPU with three more ideas. **TMA**: a copy engine moves whole tiles
# to shared memory while nobody waits. **WGMMA**: four warps multiply tiles straight from shared memory, asynchronously. **Warp
# specialisation**: one warp only loads, two or three groups of four compute, and while one does its softmax another has the tensor cores.
#
# And it is **persistent**: as many programs as multiprocessors, each with a list of row tiles. With a causal mask, row tile i costs i + 1 key
# tiles: handing out equal numbers of tiles leaves most programs idle while the last one works. So the exercise: hand them out well.


# %% question="balanced_tiles" points=2 hidden=1
def balanced_tiles(num_tiles: int, num_workers: int) -> list[list[int]]:
    """Row tiles of each worker, so that no worker has much more to do than the others. Tile i costs i + 1.

    Every tile is in exactly one list; there are num_workers lists, some of them empty if there are fewer tiles. The largest total cost is at
    most 5 % above the mean, or the cost of the largest tile, wherever there are at least four tiles a worker or fewer tiles than workers.
    """
    ### BEGIN SOLUTION
    lists: list[list[int]] = [[] for _ in range(num_workers)]
    cost = [0] * num_workers
    for tile in reversed(range(num_tiles)):  # the longest first, each to whoever has least
        worker = cost.index(min(cost))
        lists[worker].append(tile)
        cost[worker] += tile + 1
    return lists
    ### END SOLUTION


# %% [markdown]
# <details><summary>Hint 1: where to look</summary>What goes wrong if the longest tile comes last?</details>
# <details><summary>Hint 2: the idea</summary>Longest first, each to the worker with the least so far.</details>
# <details><summary>Hint 3: the shape of the code</summary>A loop over tiles from the largest; an index of the smallest total; append and add.
# </details>

# %% [markdown]
# ## Claims on trial
#
# Each line is a sentence of the article about Triton. Each is run: compiled, interpreted or counted. Where the claim is that something
# works, the compiler is asked. The verdict is computed.


# %%
@triton.jit
def claimed_warp_sync(x_ptr):
    tl.store(x_ptr, 1.0)
    tl.warp_sync()


@triton.jit
def claimed_flat_dot(x_ptr, o_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))  # a one-dimensional tile
    tl.store(o_ptr + tl.arange(0, N), tl.dot(x, x))


@triton.jit
def claimed_cast_in_loop(x_ptr, o_ptr, n, N: tl.constexpr):
    acc = tl.zeros((N,), tl.float32)
    for i in range(n):
        acc += tl.load(x_ptr + i * N + tl.arange(0, N))
        acc = acc.to(tl.float16)
    tl.store(o_ptr + tl.arange(0, N), acc)


@triton.jit
def plain_copy(x_ptr, o_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.debug_barrier()
    tl.store(o_ptr + at, tl.load(x_ptr + at, mask=at < n), mask=at < n)


def compiler_says(kernel, signature: dict, constexprs: dict | None = None, **options) -> str:
    """ "compiles", or the last line of the compiler's refusal."""
    try:
        compiled.compile_kernel(kernel, signature, constexprs or {}, arch="sm_80", **options)
    except (compiled.CompilationFailed, ValueError, TypeError) as error:
        return str(error).strip().splitlines()[-1][:110]
    return "compiles"


def claims_on_trial() -> Verdicts:
    copy_types = {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32"}
    copy = compiled.compile_kernel(plain_copy, copy_types, {"BLOCK": 256}, arch="sm_80")
    warp_sync = compiler_says(claimed_warp_sync, {"x_ptr": "*fp32"})
    flat = compiler_says(claimed_flat_dot, {"x_ptr": "*fp16", "o_ptr": "*fp32"}, {"N": 64})
    cast = compiler_says(claimed_cast_in_loop, {"x_ptr": "*fp32", "o_ptr": "*fp32", "n": "i32"}, {"N": 64})
    five = compiler_says(plain_copy, copy_types, {"BLOCK": 256}, num_warps=5)
    x = torch.randn(7 * 256 - 3, device=DEVICE)
    odd_grid = torch.equal(vector_add(x, x), 2 * x)  # a grid of 7 programs, each of 4 warps
    tiles = [flash_report({"block_m": m, "block_n": n}).occupancy.percent for m, n in ((64, 64), (32, 128))]
    reachable = {programs_per_sm(r, 0, w) * w / 64 for r in range(16, 256, 8) for w in (1, 2, 4, 8, 16)}
    column = [
        count_conflicts([swizzled_address(lane, 5, v, p) for lane in range(32)]) for v, p in ((1, 1), (4, 8), (1, 32))
    ]
    flattened = count_conflicts(
        [4 * (lane * 32 + 5) for lane in range(32)]
    )  # element row * BLOCK_N + col of a flat tile
    q, k, v = (torch.randn(32, 1, 64, dtype=torch.float16, device=DEVICE) for _ in "qkv")
    unmasked = (flash_forward(q, k, v, 0.125) - flash_causal(q, k, v, 0.125)).abs().amax().item()
    return Verdicts(
        [
            Trial("tl.warp_sync() before tl.store removes bank conflicts", "compile a kernel with it", "it compiles", warp_sync, warp_sync == "compiles"),
            Trial("a one-dimensional tile removes bank conflicts", "compile tl.dot on one-dimensional tiles", "it compiles", flat, flat == "compiles"),
            Trial("the accumulator is cast to fp16 in the loop", "compile such a loop", "it compiles", cast, cast == "compiles"),
            Trial("tl.where may be replaced by exp2(acc - m)", "attention without the mask, against causal attention", "no difference",
                  f"outputs differ by up to {unmasked:.2f}", unmasked < 1e-2),
            Trial("with num_warps 5 the compiler falls back to 4", "compile with num_warps=5", "it compiles", five, five == "compiles"),
            Trial("the grid must be a multiple of num_warps", "vector_add on a grid of 7, num_warps 4", "a wrong result",
                  "the right result" if odd_grid else "a wrong result", not odd_grid),
            Trial("occupancy rises from 62 % to 79 % with tiles of 32 x 128", "flash_causal compiled with both tiles", "62 % and 79 %",
                  f"{tiles[0]:.1f} % and {tiles[1]:.1f} %", abs(tiles[0] - 62) < 2 and abs(tiles[1] - 79) < 2),
            Trial("the theoretical occupancy of the GPU is 83 %", "all occupancies that registers and warps allow", "83 % is among them",
                  f"{len(reachable)} values, nearest {min(reachable, key=lambda r: abs(r - 0.83)):.1%}", any(abs(r - 0.83) < 0.005 for r in reachable)),
            Trial("Triton emits the deprecated atomic __syncthreads_count", "bar.red.popc in the PTX of a kernel with a barrier", "found",
                  f"{copy.ptx.count('bar.red')} bar.red, {copy.ptx.count('bar.sync')} bar.sync", "bar.red" in copy.ptx),
            Trial("a flattened tile [BLOCK_M * BLOCK_N] brings bank conflicts from 23 % to 1.2 %", "extra turns of a column read, two-dimensional and flattened",
                  "fewer turns", f"{column[0]} and {flattened}; swizzled {column[1]} and {column[2]}", flattened < column[0]),
            Trial("cuobjdump -sass kernel.ptx | grep bar.sync shows the barrier", "the barrier's name in the machine code", "bar.sync",
                  next((name for name in copy.mnemonics if name.startswith("BAR")), "none"), "bar.sync" in copy.mnemonics),
        ]
    )  # fmt: skip


try:
    verdicts = claims_on_trial()
except NotImplementedError:
    verdicts = "solve the questions first: the trials use what you built"
except Exception as error:
    verdicts = f"the trials need questions 1, 4, 5, 10, 12 and 13: {type(error).__name__}"
verdicts

# %% [markdown]
# ## What you built, and what ships
#
# `kernels/flash_attention.py` is your kernel with every case of this lab in one, and `kernels/flash_attention_hopper.py` its Hopper version.
# The plot shows both beside their peers on an NVIDIA H200; read the worst rows first.

# %%
plots.evidence_chart("flash_attention")
plt.show()
