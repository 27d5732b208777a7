"""The parts that the Hopper int4 kernel is made of: shares of the work, weights dequantized in registers, stores."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from kernels.int4_parts import dequantize_asm

ROWS = gl.constexpr(64)  # outputs of a group: the M of one WGMMA
K_BLOCK = gl.constexpr(64)  # elements of K that 16 bytes of a thread's packed weights span
UNROLLED = gl.constexpr(4)  # partial sums that are loaded at a time


@gluon.jit
def chunk(program, units):
    """Units begin..stop of a program, and (size, longer): the first `longer` programs have size + 1 units."""
    size = units // gl.num_programs(0)
    longer = units % gl.num_programs(0)
    begin = program * size + gl.minimum(program, longer)
    return begin, begin + size + (program < longer).to(gl.int32), size, longer


@gluon.jit
def chunk_of(unit, size, longer):
    """kernels.split_kv.chunk_of."""
    border = longer * (size + 1)
    return gl.where(unit < border, unit // (size + 1), longer + (unit - border) // gl.maximum(size, 1))


@gluon.jit
def scale_words(s_smem, layout: gl.constexpr):
    """The words of scale and zero of a group of K, for rows r and r + 8 of each 16: two tensors (4, 8, 1, 1)."""
    words_layout: gl.constexpr = gl.DistributedLinearLayout(
        [[1, 0]], [[0, 0], [0, 0], [0, 1], [0, 2], [0, 4]], [[0, 8], [0, 16]], [], [2, 32]
    )
    upper, lower = s_smem.load(words_layout).permute((1, 0)).split()
    row: gl.constexpr = gl.SliceLayout(2, gl.SliceLayout(3, layout))
    upper = gl.convert_layout(upper.reshape([4, 8]), row, assert_trivial=True)
    lower = gl.convert_layout(lower.reshape([4, 8]), row, assert_trivial=True)
    return upper.expand_dims(2).expand_dims(3), lower.expand_dims(2).expand_dims(3)


@gluon.jit
def dequantize(packed, upper, lower, dtype: gl.constexpr, operand: gl.constexpr):
    """(ROWS, K_BLOCK) weights in the layout `operand`, bit for bit those of kernels.int4_matmul.dequantize.

    packed: (4, 8, 4, 4) words. upper, lower: words of scale and zero of the rows r and r + 8.
    """
    ASM: gl.constexpr = dequantize_asm(dtype)
    e0, e1, e2, e3, e4, e5, e6, e7 = gl.inline_asm_elementwise(
        ASM, "=h,=h,=h,=h,=h,=h,=h,=h,r,r,r", [packed, upper, lower],
        dtype=(gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16, gl.int16), is_pure=True, pack=1,
    )  # fmt: skip
    left = gl.join(gl.join(e0, e1), gl.join(e2, e3))
    right = gl.join(gl.join(e4, e5), gl.join(e6, e7))
    w = gl.join(left, right)  # (row 16, row, column pair, column 16, column, half of row 16, half of column 16)
    w = w.permute((0, 5, 1, 3, 6, 2, 4)).reshape([ROWS, K_BLOCK]).to(dtype, bitcast=True)
    return gl.convert_layout(w, operand, assert_trivial=True)


@gluon.jit
def weights(rings, slot, b, PART: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr):
    """Block b of a step's weights of one computing group, dequantized: (ROWS, K_BLOCK), a left operand."""
    w_smem, s_smem, x_smem = rings
    SPAN: gl.constexpr = BLOCKS * K_BLOCK // GROUPS  # of K that share a scale, in a step
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, x_smem.shape[1], 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, acc_layout, 2)
    flat: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [4, 1], [1, 0])
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1, 4], [1, 8, 4, 1], [4, 1, 1, 1], [3, 2, 1, 0])
    packed = w_smem.index(slot * BLOCKS + b).slice(4 * PART, 4).load(flat).reshape([4, 8, 4, 4])
    packed = gl.convert_layout(packed, layout, assert_trivial=True)
    group = slot * GROUPS + b * K_BLOCK // SPAN
    upper, lower = scale_words(s_smem.index(group).slice(32 * PART, 32, dim=1), layout)
    if SPAN < K_BLOCK:  # two groups in a block
        late_upper, late_lower = scale_words(s_smem.index(group + 1).slice(32 * PART, 32, dim=1), layout)
        k16 = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(2, layout))))
        early = (k16 < 2)[None, None, None, :]
        upper = gl.where(early, upper, late_upper)
        lower = gl.where(early, lower, late_lower)
    return dequantize(packed, upper, lower, x_smem.dtype, operand)


@gluon.jit
def multiply_step(
    acc, w, rings, full, free, count, PART: gl.constexpr, BLOCKS: gl.constexpr, GROUPS: gl.constexpr,
    LAST: gl.constexpr,
):  # fmt: skip
    """Multiply step `count`, whose first block is w; while a block is multiplied, the next one is dequantized."""
    STAGES: gl.constexpr = full.shape[0]
    slot = count % STAGES
    for b in gl.static_range(BLOCKS):
        token = warpgroup_mma(w, rings[2].index(slot * BLOCKS + b).permute((1, 0)), acc, is_async=True)
        if b + 1 < BLOCKS:
            w = weights(rings, slot, b + 1, PART, BLOCKS, GROUPS)
        elif not LAST:
            after = (count + 1) % STAGES
            mbarrier.wait(full.index(after), ((count + 1) // STAGES) & 1)
            w = weights(rings, after, 0, PART, BLOCKS, GROUPS)
        acc = warpgroup_mma_wait(0, deps=[token])
    mbarrier.arrive(free.index(slot), count=1)
    return acc, w


@gluon.jit
def store_tile(acc, y_ptr, row, col, m, n):
    """Write a tile of the transposed output, (outputs, tokens), through shared memory: 16 bytes of a token a thread."""
    COLS: gl.constexpr = acc.shape[1]
    if COLS > 32:  # in halves: little shared memory is left
        left, right = acc.reshape([ROWS, 2, COLS // 2]).permute((0, 2, 1)).split()
        store_tile(left, y_ptr, row, col, m, n)
        store_tile(right, y_ptr, row, col + COLS // 2, m, n)
    else:
        layout: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
        y = gl.convert_layout(acc.to(y_ptr.dtype.element_ty), layout)
        rows = row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, COLS, gl.SliceLayout(0, layout))
        place = y_ptr + cols.to(gl.int64)[None, :] * n + rows[:, None]
        gl.store(place, y, mask=(cols < m)[None, :] & (rows < n)[:, None])


@gluon.jit
def store_partial(acc, part_ptr):
    COLS: gl.constexpr = acc.shape[1]
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, acc.type.layout))
    cols = gl.arange(0, COLS, gl.SliceLayout(0, acc.type.layout))
    gl.store(part_ptr + rows[:, None] * COLS + cols[None, :], acc)


@gluon.jit
def combine(part_ptr, first, last, y_ptr, row, col, m, n, BLOCK_M: gl.constexpr, SLOT: gl.constexpr):
    """Add up the partial sums of chunks first..last and write them."""
    COLS: gl.constexpr = min(BLOCK_M, 32)
    layout: gl.constexpr = gl.BlockedLayout([1, 4], [128 // COLS, COLS // 4], [4, 1], [1, 0])
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    for c in range(0, gl.minimum(BLOCK_M, m - col), COLS):
        cols = c + gl.arange(0, COLS, gl.SliceLayout(0, layout))
        place = part_ptr + rows[:, None] * BLOCK_M + cols[None, :]
        total = gl.zeros([ROWS, COLS], gl.float32, layout)
        for other in range(first, last + 1, UNROLLED):
            for i in gl.static_range(UNROLLED):
                slot = (2 * (other + i) + (other + i == first).to(gl.int32)).to(gl.int64)
                live = (rows < ROWS)[:, None] & (other + i <= last)
                # .cg: other SMs wrote these a moment ago, and this SM's L1 must not answer for them.
                total += gl.load(place + slot * SLOT, mask=live, other=0.0, cache_modifier=".cg")
        out = y_ptr + (col + cols).to(gl.int64)[None, :] * n + (row + rows)[:, None]
        live = (col + cols < m)[None, :] & (row + rows < n)[:, None]
        gl.store(out, total.to(y_ptr.dtype.element_ty), mask=live)
