"""W4A16: activations in 16 bits times weights in 4, which are dequantized on their way to the tensor cores.

At a small batch a matrix product is as fast as its weights are read, and 4 bits are a quarter of 16. The weights' order
is that of `kernels.int4_repack`: what a thread of the matrix instructions needs of 64 of K are 16 neighbouring bytes.
Work is shared out as in Stream-K (Osama et al., arXiv:2301.03598): see `kernels.int4_hopper`, the faster version where
the GPU is a Hopper.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels import int4_hopper
from kernels.int4_parts import MAGIC_BFLOAT16, MAGIC_FLOAT16, Workspace, dequantize_asm, share_out
from kernels.int4_repack import ONE_GROUP, Int4Weight
from kernels.split_kv import chunk_of
from kernels.validate import require, require_tensors, require_type


@triton.jit
def _halves(words, DTYPE: tl.constexpr):
    """The scale and the negated MAGIC plus zero point of words of Int4Weight.scale_zeros, in float32."""
    scale = (words & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    minus = ((words >> 16) & 0xFFFF).to(tl.uint16).to(DTYPE, bitcast=True).to(tl.float32)
    return scale, minus


@triton.jit
def dequantize(packed, upper, lower, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """(N / 16, 8, 4, 4) words and the words of scale and zero of their rows, (N / 16, 8, 1, 1 or 4) -> (N, 64) weights.

    upper is of rows r, lower of rows r + 8. With ASM in inline assembly, else without: the bits are the same.
    """
    ROWS: tl.constexpr = packed.shape[0] * 16
    if ASM:
        upper = tl.broadcast_to(upper, packed.shape)
        lower = tl.broadcast_to(lower, packed.shape)
        e0, e1, e2, e3, e4, e5, e6, e7 = tl.inline_asm_elementwise(
            dequantize_asm(DTYPE), "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [packed, upper, lower],
            dtype=(tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16, tl.int16),
            is_pure=True, pack=1,
        )  # fmt: skip
        left = tl.join(tl.join(e0, e1), tl.join(e2, e3))
        right = tl.join(tl.join(e4, e5), tl.join(e6, e7))
        w = tl.join(left, right).to(DTYPE, bitcast=True)
    else:
        MAGIC: tl.constexpr = MAGIC_BFLOAT16 if tl.bfloat16 == DTYPE else MAGIC_FLOAT16
        column = tl.arange(0, 2)[:, None, None]  # of a pair of columns
        row_half = tl.arange(0, 2)[None, :, None]
        column_half = tl.arange(0, 2)[None, None, :]
        shift = 4 * (2 * column_half + row_half + 4 * column)  # (2, 2, 2)
        code = (packed[:, :, :, :, None, None, None] >> shift) & 15
        scale_upper, minus_upper = _halves(upper, DTYPE)
        scale_lower, minus_lower = _halves(lower, DTYPE)
        first = row_half == 0
        scale = tl.where(first, scale_upper[:, :, :, :, None, None, None], scale_lower[:, :, :, :, None, None, None])
        minus = tl.where(first, minus_upper[:, :, :, :, None, None, None], minus_lower[:, :, :, :, None, None, None])
        w = ((code.to(tl.float32) + MAGIC + minus) * scale).to(DTYPE)  # in float32 all is exact but this last rounding
    return tl.reshape(tl.permute(w, (0, 5, 1, 3, 6, 2, 4)), (ROWS, 64))


@triton.jit
def load_block(words_ptr, scale_zeros_ptr, block, n16, rows16, k, GROUP: tl.constexpr):
    """Of the rows 16 * n16 onwards and 64 of K: packed weights, and words of scale and zero, for `dequantize`.

    What is beyond rows16 or k gets the scale 0.
    """
    lane = tl.arange(0, 8)
    k16 = tl.arange(0, 4)
    within = lane[:, None, None] * 16 + tl.arange(0, 4)[None, :, None] * 4 + k16[None, None, :]
    square = (block * rows16 + n16).to(tl.int64) * 128
    here = (n16 < rows16)[:, None, None, None]
    packed = tl.load(words_ptr + square[:, None, None, None] + within[None, :, :, :], mask=here, other=0)
    here = here & (block * 64 + k16 * 16 < k)[None, None, None, :]
    group = (block * 64 + k16 * 16) // GROUP
    place = group[None, None, None, :] * (16 * rows16) + (n16[:, None] * 8 + lane[None, :])[:, :, None, None]
    upper = tl.load(scale_zeros_ptr + place, mask=here, other=0)  # (N / 16, 8, 1, 4)
    lower = tl.load(scale_zeros_ptr + place + 8 * rows16, mask=here, other=0)
    return packed, upper, lower


@triton.jit(do_not_specialize=["m", "tiles_m", "tiles_n", "k_blocks", "unit"])
def _int4_matmul_kernel(
    x_ptr, words_ptr, scale_zeros_ptr, y_ptr, part_ptr, arrivals_ptr, stride_xm, m, n, k, tiles_m, tiles_n, k_blocks,
    unit, rows16, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_M: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Program = a chunk of the steps of 64 of K of all output tiles; unit: steps never parted, dividing k_blocks."""
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    program = tl.program_id(0)
    units = tiles_m * tiles_n * k_blocks // unit
    size = units // tl.num_programs(0)
    longer = units % tl.num_programs(0)
    step = (program * size + tl.minimum(program, longer)) * unit
    stop = step + (size + (program < longer).to(tl.int32)) * unit
    row16 = tl.arange(0, BLOCK_N // 16)
    cols = tl.arange(0, 64)
    while step < stop:
        tile = step // k_blocks
        end = tl.minimum(stop, (tile + 1) * k_blocks)
        n16 = tile // tiles_m * (BLOCK_N // 16) + row16
        token = tile % tiles_m * BLOCK_M + tl.arange(0, BLOCK_M)
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for i in tl.range(step, end):
            block = i % k_blocks
            packed, upper, lower = load_block(words_ptr, scale_zeros_ptr, block, n16, rows16, k, GROUP)
            w = dequantize(packed, upper, lower, DTYPE, ASM)
            column = block * 64 + cols
            x = tl.load(
                x_ptr + token.to(tl.int64)[:, None] * stride_xm + column[None, :],
                mask=(token < m)[:, None] & (column < k)[None, :], other=0.0,
            )  # (BLOCK_M, 64)  # fmt: skip
            acc = tl.dot(w, tl.trans(x), acc)
        first = chunk_of(tile * k_blocks // unit, tl.maximum(size, 1), longer)
        last = chunk_of((tile * k_blocks + k_blocks - 1) // unit, tl.maximum(size, 1), longer)
        row = tile // tiles_m * BLOCK_N + tl.arange(0, BLOCK_N)
        out = y_ptr + token.to(tl.int64)[None, :] * n + row[:, None]
        live = (token < m)[None, :] & (row < n)[:, None]
        if first == last:
            tl.store(out, acc.to(DTYPE), mask=live)
        else:
            # Two slots a program: of all tiles in its chunk, only the first can have begun before and the last go on.
            inside = part_ptr + tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + tl.arange(0, BLOCK_M)[None, :]
            slot = 2 * program + (program == first).to(tl.int32)
            tl.store(inside + slot.to(tl.int64) * (BLOCK_N * BLOCK_M), acc)
            tl.debug_barrier()  # every thread's stores come before the arrival that announces them
            # At most one tile begins in a chunk and goes on, so the first chunk names its counter.
            if tl.atomic_add(arrivals_ptr + first, 1, sem="acq_rel", scope="gpu") == last - first:
                total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
                for chunk in range(first, last + 1):
                    theirs = (2 * chunk + (chunk == first).to(tl.int32)).to(tl.int64)
                    # .cg: other SMs wrote these a moment ago, and this SM's L1 must not answer for them.
                    total += tl.load(inside + theirs * (BLOCK_N * BLOCK_M), cache_modifier=".cg")
                tl.store(out, total.to(DTYPE), mask=live)
                tl.store(arrivals_ptr + first, 0)
        step = end


@triton.jit
def _dequantize_kernel(
    words_ptr, scale_zeros_ptr, w_ptr, n, k, rows16, GROUP: tl.constexpr, BLOCK_N: tl.constexpr, ASM: tl.constexpr
):
    """Program (64 of K, BLOCK_N rows): reads half a byte and writes two bytes an element."""
    DTYPE: tl.constexpr = w_ptr.dtype.element_ty
    block = tl.program_id(0)
    n16 = tl.program_id(1) * (BLOCK_N // 16) + tl.arange(0, BLOCK_N // 16)
    packed, upper, lower = load_block(words_ptr, scale_zeros_ptr, block, n16, rows16, k, GROUP)
    w = dequantize(packed, upper, lower, DTYPE, ASM)
    row = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = block * 64 + tl.arange(0, 64)
    live = (row < n)[:, None] & (column < k)[None, :]
    tl.store(w_ptr + row.to(tl.int64)[:, None] * k + column[None, :], w, mask=live)


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct."""

    block_n: int
    block_m: int
    num_warps: int
    num_stages: int
    ctas_per_sm: int


def plan_for(m: int) -> Plan:
    """A launch that suits m rows of x."""
    block_m = min(128, max(16, triton.next_power_of_2(m)))
    return Plan(64 if block_m <= 64 else 128, block_m, 4 if block_m <= 64 else 8, 4 if block_m <= 64 else 3, 2)


VARIANTS = ("auto", "hopper", "tl", "dequantize")
DEQUANTIZED_FROM = 4096  # rows of x: dequantizing all of the weights takes less time then than it saves


def int4_matmul(
    x: torch.Tensor,
    weight: Int4Weight,
    *,
    out: torch.Tensor | None = None,
    workspace: Workspace | None = None,
    variant: str = "auto",
) -> torch.Tensor:
    """x times the transpose of a matrix of 4-bit weights: [..., in_features] -> [..., out_features].

    x: of the weights' dtype, float16 or bfloat16, in_features contiguous; any number of rows, also none. Products are
        summed up in float32.
    weight: made by `kernels.int4_repack.repack_awq`.
    out: written and returned, if given: contiguous.
    workspace: scratch memory that is kept between calls. If None, one is made for this call, which costs a memset. Two
        calls that may run at the same time (on two streams) need two.
    variant: "hopper" is the Gluon kernel, for sm_90; "tl" runs everywhere; "dequantize" writes the weights out in 16
        bits, 2 * in_features * out_features bytes, and leaves the product to cuBLAS; "auto" takes the fastest.

    Raises TypeError or ValueError, naming the argument, before anything is launched. Safe to capture in a CUDA graph.
    """
    _validate(x, weight, out, variant)
    rows = x.reshape(-1, weight.in_features)
    m, n = rows.shape[0], weight.out_features
    out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device) if out is None else out
    if m == 0 or n == 0:
        return out
    if variant == "auto":
        variant = _fastest(rows)
    y = out.view(m, n)
    if variant == "dequantize":
        torch.matmul(rows, dequantized(weight).T, out=y)
    elif variant == "hopper":
        reason = int4_hopper.unsupported(rows)
        require(reason is None, f"variant: the Hopper kernel cannot take this x: {reason}")
        int4_hopper.launch(rows, weight, y, workspace)
    else:
        _launch(rows, weight, y, workspace, _compiles())
    return out


def dequantized(weight: Int4Weight, asm: bool | None = None) -> torch.Tensor:
    """The weights [out_features, in_features] in their dtype. asm: with inline assembly; None where it can run."""
    n, k = weight.out_features, weight.in_features
    w = torch.empty(n, k, dtype=weight.dtype, device=weight.words.device)
    block_n = 64
    grid = (weight.words.shape[0], triton.cdiv(n, block_n))
    _dequantize_kernel[grid](
        weight.words, weight.scale_zeros, w, n, k, weight.words.shape[1], GROUP=_group(weight), BLOCK_N=block_n,
        ASM=_compiles() if asm is None else asm, num_warps=4,
    )  # fmt: skip
    return w


def _fastest(x: torch.Tensor) -> str:
    if x.shape[0] >= DEQUANTIZED_FROM:
        return "dequantize"
    return "tl" if int4_hopper.unsupported(x) else "hopper"


def _compiles() -> bool:
    """Whether kernels are compiled here. The interpreter knows no inline assembly."""
    return isinstance(_int4_matmul_kernel, triton.JITFunction)


def _group(weight: Int4Weight) -> int:
    """The group size that kernels are compiled for: K is none, or each K would have its own."""
    return ONE_GROUP if weight.group_size == weight.in_features else weight.group_size


def _launch(
    x: torch.Tensor, weight: Int4Weight, y: torch.Tensor, workspace: Workspace | None, asm: bool,
    plan: Plan | None = None,
) -> None:  # fmt: skip
    """Launch the kernel of this module on arguments that were found right."""
    m, k = x.shape
    n, k_blocks = weight.out_features, weight.words.shape[0]
    plan = plan or plan_for(m)
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 2
    tiles_m, tiles_n = triton.cdiv(m, plan.block_m), triton.cdiv(n, plan.block_n)
    programs, unit = share_out(tiles_m * tiles_n, k_blocks, num_sms * plan.ctas_per_sm, 8)
    workspace = Workspace.of(workspace, x.device, 2 * programs * plan.block_n * plan.block_m, programs)
    _int4_matmul_kernel[(programs,)](
        x, weight.words, weight.scale_zeros, y, workspace.parts, workspace.arrivals, x.stride(0), m, n, k, tiles_m,
        tiles_n, k_blocks, unit, weight.words.shape[1], GROUP=_group(weight), BLOCK_N=plan.block_n,
        BLOCK_M=plan.block_m, ASM=asm, num_warps=plan.num_warps, num_stages=plan.num_stages,
    )  # fmt: skip


def _validate(x: torch.Tensor, weight: Int4Weight, out: torch.Tensor | None, variant: str) -> None:
    require(variant in VARIANTS, f"variant: expected one of {', '.join(VARIANTS)}, got {variant!r}")
    require_type(isinstance(weight, Int4Weight), f"weight: expected an Int4Weight, got {type(weight).__name__}")
    require_tensors(x=x, weight=weight.words, **({} if out is None else {"out": out}))
    require_type(x.dtype == weight.dtype, f"x: expected {weight.dtype} like the weights, got {x.dtype}")
    require(
        x.ndim >= 1 and x.shape[-1] == weight.in_features,
        f"x: expected [..., {weight.in_features}], got {list(x.shape)}",
    )
    require(x.stride(-1) == 1, f"x: in_features must be contiguous, its stride is {x.stride(-1)}")
    shape = [*x.shape[:-1], weight.out_features]
    require(
        out is None or (list(out.shape) == shape and out.dtype == x.dtype and out.is_contiguous()),
        f"out: expected {shape} of {x.dtype}, contiguous",
    )
