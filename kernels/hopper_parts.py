"""The parts that the Hopper attention kernel is made of: schedule, rings of shared memory, softmax, products, store.

A ring is (shared memory for some tiles, a barrier a slot that says that the tile has come). `count` numbers the tiles
that go through a ring, from the kernel's start on: its slot is count % STAGES, its barrier's phase count // STAGES.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma

ROWS = gl.constexpr(64)  # queries of a warp group: the M of one WGMMA
LN_2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def cdiv(a, b):
    return (a + b - 1) // b


@gluon.jit
def unit_of(unit, tiles_m, CAUSAL: gl.constexpr):
    """The work that a program takes at a time -> head number, and the range of its query tiles.

    With a causal mask a short tile goes with a long one, first with last, second with last but one: every unit is then
    the same work. Units of a head are neighbours, so that the programs share its K and V in the L2 cache.
    """
    units = (tiles_m + 1) // 2 if CAUSAL else tiles_m
    pair = unit // units
    first = unit % units
    if CAUSAL:
        stop = tiles_m - first
        step = gl.maximum(tiles_m - 1 - 2 * first, 1)
    else:
        stop = first + 1
        step = 1
    return pair, first, stop, step


@gluon.jit
def num_units(num_pairs, tiles_m, CAUSAL: gl.constexpr):
    return num_pairs * ((tiles_m + 1) // 2 if CAUSAL else tiles_m)


@gluon.jit
def num_kv_tiles(tile_m, q_len, k_len, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CAUSAL: gl.constexpr):
    """KV tiles that some query of the tile sees; at least one, so that rows without keys get their zeros written."""
    end = k_len
    if CAUSAL:
        end = gl.minimum(k_len, (tile_m + 1) * BLOCK_M + k_len - q_len)
    return gl.maximum(cdiv(gl.maximum(end, 0), BLOCK_N), 1)


@gluon.jit
def make_barriers(SLOTS: gl.constexpr, ARRIVALS: gl.constexpr):
    """SLOTS barriers, each of which ARRIVALS arrivals complete."""
    barriers = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(SLOTS):
        mbarrier.init(barriers.index(i), count=ARRIVALS)
    return barriers


@gluon.jit
def make_ring(SLOTS: gl.constexpr, desc):
    """Shared memory for SLOTS tiles of desc's shape, and the barriers that say that a slot is full."""
    shape: gl.constexpr = [SLOTS] + desc.block_type.shape  # noqa: RUF005 - no stars in a kernel
    return gl.allocate_shared_memory(desc.dtype, shape, desc.layout), make_barriers(SLOTS, 1)


@gluon.jit
def load_tile(desc, batch, row, head, ring, count, free, step):
    """Ask for tile `count` of a ring, once the groups have done step `step` less a ring's length."""
    smem, full = ring
    STAGES: gl.constexpr = smem.shape[0]
    slot = count % STAGES
    mbarrier.wait(free.index(step % STAGES), (step // STAGES + 1) & 1)
    mbarrier.expect(full.index(slot), desc.block_type.nbytes)
    tma.async_copy_global_to_shared(desc, [batch, row, head, 0], full.index(slot), smem.index(slot))


@gluon.jit
def softmax(score, qk_scale, peak, total, last_key, first_key, MASKED: gl.constexpr):
    """kernels.flash_attention.softmax_step, with the mask."""
    BLOCK_N: gl.constexpr = score.shape[1]
    if MASKED:
        key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
        score = gl.where(key[None, :] <= last_key[:, None], score, float("-inf"))
    new_peak = gl.maximum(peak, gl.max(score, 1) * qk_scale)  # (ROWS,)
    shift = new_peak
    if MASKED:
        shift = gl.where(new_peak == float("-inf"), 0.0, new_peak)
    p = gl.exp2(score * qk_scale - shift[:, None])  # (ROWS, BLOCK_N)
    alpha = gl.exp2(peak - shift)
    return p, alpha, new_peak, total * alpha + gl.sum(p, 1)


@gluon.jit
def ask_scores(q, ring, count):
    """Start q times the transpose of KV tile `count` once it has come; gives what to wait for, (ROWS, BLOCK_N)."""
    smem, full = ring[0], ring[1]
    BLOCK_N: gl.constexpr = smem.shape[2]
    STAGES: gl.constexpr = smem.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    slot = count % STAGES
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    k = smem.index(slot).reshape([BLOCK_N, smem.shape[4]]).permute((1, 0))
    return warpgroup_mma(q, k, gl.zeros([ROWS, BLOCK_N], gl.float32, layout), use_acc=False, is_async=True)


@gluon.jit
def ask_output(p, ring, count, acc):
    """Start acc + p times V tile `count` once it has come; gives what to wait for, (ROWS, DIM)."""
    smem, full = ring[0], ring[1]
    STAGES: gl.constexpr = smem.shape[0]
    slot = count % STAGES
    operand = gl.convert_layout(p.to(smem.dtype), gl.DotOperandLayout(0, acc.type.layout, 2))  # moves no data
    mbarrier.wait(full.index(slot), (count // STAGES) & 1)
    return warpgroup_mma(operand, smem.index(slot).reshape([smem.shape[2], smem.shape[4]]), acc, is_async=True)


@gluon.jit
def store_tile(
    acc, peak, total, o_ptr, lse_ptr, row, first_row, q_len, stride_os, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr
):
    """Divide and write the rows below q_len. acc: (ROWS, DIM). row, peak, total: (ROWS,)."""
    DIM: gl.constexpr = acc.shape[1]
    # Whole rows for coalesced stores, unless shared memory has no room for the exchange that takes.
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [max(256 // DIM, 1), min(DIM // 8, 32)], [4, 1], [1, 0])
    layout: gl.constexpr = rows if DIM <= 128 else acc.type.layout
    divisor = gl.where(total == 0.0, 1.0, total)
    factor = gl.convert_layout(1.0 / divisor, gl.SliceLayout(1, acc.type.layout))
    o = gl.convert_layout((acc * factor[:, None]).to(o_ptr.dtype.element_ty), layout)
    o_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    place = o_ptr + o_row.to(gl.int64)[:, None] * stride_os + dim[None, :]
    live = (o_row < q_len)[:, None]
    if HEAD_DIM < DIM:
        live = live & (dim < HEAD_DIM)[None, :]
    gl.store(place, o, mask=live)
    if HAS_LSE:
        lse = gl.where(total == 0.0, float("-inf"), (peak + gl.log2(divisor)) * LN_2)
        gl.store(lse_ptr + row, lse, mask=row < q_len)
