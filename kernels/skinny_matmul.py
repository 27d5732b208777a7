"""Matrix products with few rows: y = x @ w.T for the 1 to 128 tokens of a decode step, bound by reading w.

A tile of w has its outputs as rows and x is the narrow side of the dot, so that 16 tokens pad no tensor core's rows;
the tiles of w are cut so that all SMs read at once. Where there are too few outputs for that, K is split into parts
whose float32 sums the next kernel adds as it reads them (see kernels.fused): no second launch, no atomics, and the same
bits every time. Where the GPU can, a launch starts while the kernel before it still works (kernels.early_start). To ask
for weights into L2 in that time was tried and lost: at one row of the 8B shape it cost 3 % to 10 % of the step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.early_start import early_options, let_next_start, wait_for_previous
from kernels.validate import FLOATS, require, require_tensors, require_type

MAX_ROWS = 128


@triton.jit
def _load(ptr, mask, EVEN: tl.constexpr):
    return tl.load(ptr) if EVEN else tl.load(ptr, mask=mask, other=0.0)


@triton.jit(do_not_specialize=["m"])
def _skinny_matmul_kernel(
    x_ptr, w_ptr, y_ptr, m, n, k, k_part, stride_xm, stride_wn, stride_yp, stride_ym,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GATED: tl.constexpr,
    EVEN_N: tl.constexpr, EVEN_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """Program (tile of outputs, part of K). Reads its share of w once, x once, and writes m * BLOCK_N sums.

    GATED: w holds n gate rows and n up rows; the output is silu(gate) * up. Needs all of K in one part.
    """
    let_next_start(EARLY)
    part = tl.program_id(1)
    row = tl.arange(0, BLOCK_M)
    col = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    x_tile = x_ptr + row[:, None] * stride_xm + lane[None, :]
    w_tile = w_ptr + col.to(tl.int64)[:, None] * stride_wn + lane[None, :]
    up_tile = w_ptr + (col + n).to(tl.int64)[:, None] * stride_wn + lane[None, :]
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    up = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    begin = part * k_part
    wait_for_previous(EARLY)
    for start in tl.range(begin, tl.minimum(begin + k_part, k), BLOCK_K):
        here = (start + lane < k)[None, :]
        x_mask = (row < m)[:, None] if EVEN_K else (row < m)[:, None] & here
        x = tl.load(x_tile + start, mask=x_mask, other=0.0)  # (BLOCK_M, BLOCK_K)
        w = _load(w_tile + start, (col < n)[:, None] & here, EVEN_N and EVEN_K)  # (BLOCK_N, BLOCK_K)
        acc = tl.dot(w, x.T, acc, input_precision="ieee")  # (BLOCK_N, BLOCK_M)
        if GATED:
            w = _load(up_tile + start, (col < n)[:, None] & here, EVEN_N and EVEN_K)
            up = tl.dot(w, x.T, up, input_precision="ieee")
    if GATED:
        acc = acc * tl.sigmoid(acc) * up
    y = y_ptr + part * stride_yp + row[None, :] * stride_ym + col[:, None]
    tl.store(y, acc.to(y_ptr.dtype.element_ty), mask=(row < m)[None, :] & (col < n)[:, None])


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct.

    block_n: outputs in a tile. block_k: elements of K in a tile. parts: that K is split into.
    """

    block_n: int
    block_k: int
    parts: int = 1
    num_warps: int = 4
    num_stages: int = 4


SMS = 132
"""Of an H200, on which the plans were measured."""
SHARED = 200 * 1024
"""Bytes of shared memory that the tiles of a program may take there."""


def faster_than_cublas(m: int, n: int, k: int, *, gated: bool = False) -> bool:
    """Whether this kernel beats cuBLAS (and a launch that applies silu) at this shape in 16 bits, as measured.

    Few rows: always, for the next kernel adds up the parts. From 33 rows on, cuBLAS reads matrices of 30 to 150 MB
    faster; ours is faster where launches outweigh reading, and where outputs are so many that no SM runs dry.
    """
    if m <= 32:
        return True
    if m > 64:
        return False
    if gated:
        return n >= 64 * SMS
    return n * k <= 8 << 20 or n >= 512 * SMS


def plan_for(m: int, n: int, k: int, element_size: int, *, gated: bool = False, whole: bool = False) -> Plan:
    """About one program an SM with 64 to 128 KB of w on its way, as measured on an H200.

    whole: K must not be split, as for `gated`.
    """
    if element_size > 2:  # no tensor cores: float32 is for tests
        return Plan(16, 32, num_stages=2)
    rows = max(16, triton.next_power_of_2(m))
    if gated:
        many = n >= 64 * SMS
        if rows >= 64:
            plan = Plan(128, 64, num_warps=8) if many else Plan(32, 128, num_stages=6)
        else:
            plan = Plan(64, 128, num_stages=3) if many else Plan(32, 256)
    elif whole or n >= 256 * SMS:
        plan = Plan(64, 128) if rows < 64 else Plan(128, 128, num_warps=8)
    elif rows < 64 and SMS * 3 <= 16 * triton.cdiv(n, 128) <= SMS * 4 and k >= 4096:
        plan = Plan(128, 64, 4, num_stages=8)  # n of about 4096: long rows, read with more on its way
    else:
        parts = 1
        while parts < 8 and triton.cdiv(n, 64) * parts * 4 <= SMS * 3 and k // (parts * 2) >= 256:
            parts *= 2
        plan = Plan(64, 128, parts) if rows < 64 else Plan(64, 64, parts, num_stages=6)
    tile = 2 * plan.block_k * (plan.block_n * (1 + gated) + rows)
    return replace(plan, num_stages=max(2, min(plan.num_stages, SHARED // tile)))


def skinny_matmul(
    x: torch.Tensor, w: torch.Tensor, *, gated: bool = False, whole: bool = False, plan: Plan | None = None
) -> torch.Tensor:
    """x @ w.T for few rows of x.

    x: [rows, k], at most 128 rows, k contiguous. w: [n, k] of x's dtype (float16, bfloat16, float32), k contiguous.
    gated: w is [2 * n, k], gate rows above up rows, and the output silu(x @ gate.T) * (x @ up.T), [rows, n].
    whole: give [rows, n] of x's dtype. Else it may be [parts, rows, n] float32, still to be summed over the parts.
    plan: None is the one made for the shape.

    Reads n * k (gated: twice that) elements of w; 2 * rows FLOPs for each. TypeError or ValueError, naming the
    argument, before anything is launched. Safe to capture in a CUDA graph.
    """
    require_tensors(x=x, w=w)
    require_type(x.dtype in FLOATS, f"x: expected float16, bfloat16 or float32, got {x.dtype}")
    require_type(w.dtype == x.dtype, f"w: expected {x.dtype} like x, got {w.dtype}")
    require(
        x.ndim == 2 and x.shape[0] <= MAX_ROWS and x.stride(1) == 1,
        f"x: expected [rows, k], at most {MAX_ROWS} rows, k contiguous, got {list(x.shape)}",
    )
    m, k = x.shape
    require(
        w.ndim == 2 and w.shape[1] == k and w.stride(1) == 1 and k > 0,
        f"w: expected [n, {k}], k contiguous, got {list(w.shape)}",
    )
    require(not gated or w.shape[0] % 2 == 0, f"w: gated needs as many gate as up rows, got {w.shape[0]}")
    n = w.shape[0] // 2 if gated else w.shape[0]
    plan = plan or plan_for(m, n, k, x.element_size(), gated=gated, whole=whole)
    parts = plan.parts
    require(parts == 1 or not (gated or whole), f"plan: {parts} parts, but gated and whole need all of K in one")
    y = x.new_empty((m, n)) if parts == 1 else x.new_empty((parts, m, n), dtype=torch.float32)
    if m == 0:
        return y
    k_part = triton.cdiv(triton.cdiv(k, parts), plan.block_k) * plan.block_k
    even_n, even_k = n % plan.block_n == 0, k % (plan.block_k * parts) == 0
    _skinny_matmul_kernel[(triton.cdiv(n, plan.block_n), parts)](
        x, w, y, m, n, k, k_part, x.stride(0), w.stride(0), y.stride(0) if parts > 1 else 0, y.stride(-2),
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=plan.block_n, BLOCK_K=plan.block_k, GATED=gated,
        EVEN_N=even_n, EVEN_K=even_k, num_warps=plan.num_warps, num_stages=plan.num_stages, **early_options(x.device),
    )  # fmt: skip
    return y
