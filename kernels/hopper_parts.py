"""The parts that the Hopper attention kernel is made of: schedule, rings of shared memory, softmax, products, store.

A ring is (shared memory for some tiles, a barrier a slot that says that the tile has come). `count` numbers the tiles
that go through a ring, from the kernel's start on: its slot is count % STAGES, its barrier's phase count // STAGES.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

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
def softmax(score, qk_scale, peak, total, last_key, first_key, tail, MASKED: gl.constexpr):
    """kernels.flash_attention.softmax_step, with the mask.

    tail: None, or (start, shift): from column `start` of the sequence on, keys lie `shift` columns late, after zeros.
    """
    BLOCK_N: gl.constexpr = score.shape[1]
    if MASKED:
        key = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(0, score.type.layout))
        if tail is not None:
            moved = key - tail[1]
            key = gl.where(key < tail[0], key, gl.where(moved < tail[0], 2147483647, moved))
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
def step(
    acc, p, peak, total, q, k_ring, v_ring, free, turns, count, turn, last_key, first_key, tail, qk_scale,
    GROUP: gl.constexpr, PING_PONG: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The output of KV tile `count`, whose weights are p, beside the weights of KV tile count + 1."""
    GROUPS: gl.constexpr = turns.shape[0]
    STAGES: gl.constexpr = free.shape[0]
    if PING_PONG:  # the groups take turns at the tensor cores, so that one's softmax meets the other's products
        mbarrier.wait(turns.index(GROUP), (count - turn) & 1)
    score = ask_scores(q, k_ring, count + 1)
    acc = ask_output(p, v_ring, count, acc)
    if PING_PONG:
        mbarrier.arrive(turns.index((GROUP + 1) % GROUPS), count=1)
    score = warpgroup_mma_wait(1, deps=[score])
    p, alpha, peak, total = softmax(score, qk_scale, peak, total, last_key, first_key, tail, MASKED)
    acc = warpgroup_mma_wait(0, deps=[acc])
    mbarrier.arrive(free.index((count + 1) % STAGES), count=1)  # K tile count + 1 and V tile `count` are done with
    acc = acc * gl.convert_layout(alpha, gl.SliceLayout(1, acc.type.layout))[:, None]
    return acc, p, peak, total


@gluon.jit
def attend(
    q, k_ring, v_ring, q_free, free, turns, count, turn, num_tiles, masked, last_key, tail, qk_scale,
    GROUP: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """A group's tile of queries over KV tiles num_tiles - 1 to 0, which are tiles `count` onwards of the rings.

    The first `masked` of them, at least one, need the mask. last_key: (ROWS,), the last key that each query sees.
    Gives acc (ROWS, DIM), not yet divided, peak and total (ROWS,), and the next count.
    """
    BLOCK_N: gl.constexpr = k_ring[0].shape[2]
    DIM: gl.constexpr = k_ring[0].shape[4]
    STAGES: gl.constexpr = free.shape[0]
    row_layout: gl.constexpr = last_key.type.layout
    out_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    first_key = (num_tiles - 1) * BLOCK_N
    score = warpgroup_mma_wait(0, deps=[ask_scores(q, k_ring, count)])
    mbarrier.arrive(free.index(count % STAGES), count=1)
    peak = gl.full([ROWS], float("-inf"), gl.float32, row_layout)
    total = gl.zeros([ROWS], gl.float32, row_layout)
    p, _alpha, peak, total = softmax(score, qk_scale, peak, total, last_key, first_key, tail, True)
    acc = gl.zeros([ROWS, DIM], gl.float32, out_layout)
    for _ in range(masked - 1):
        first_key -= BLOCK_N
        acc, p, peak, total = step(
            acc, p, peak, total, q, k_ring, v_ring, free, turns, count, turn, last_key, first_key, tail, qk_scale,
            GROUP, PING_PONG, True,
        )  # fmt: skip
        count += 1
    for _ in range(num_tiles - masked):
        first_key -= BLOCK_N
        acc, p, peak, total = step(
            acc, p, peak, total, q, k_ring, v_ring, free, turns, count, turn, last_key, first_key, tail, qk_scale,
            GROUP, PING_PONG, False,
        )  # fmt: skip
        count += 1
    mbarrier.arrive(q_free.index(GROUP), count=1)
    acc = warpgroup_mma_wait(0, deps=[ask_output(p, v_ring, count, acc)])
    count += 1
    return acc, peak, total, count


@gluon.jit
def divided(acc, total, dtype: gl.constexpr):
    """acc / total, (ROWS, DIM), in whole rows for coalesced stores; zeros where total is 0, a query without keys."""
    DIM: gl.constexpr = acc.shape[1]
    # Unless shared memory has no room for the exchange that whole rows take.
    rows: gl.constexpr = gl.BlockedLayout([1, 8], [max(256 // DIM, 1), min(DIM // 8, 32)], [4, 1], [1, 0])
    layout: gl.constexpr = rows if DIM <= 128 else acc.type.layout
    factor = gl.convert_layout(1.0 / gl.where(total == 0.0, 1.0, total), gl.SliceLayout(1, acc.type.layout))
    return gl.convert_layout((acc * factor[:, None]).to(dtype), layout)


@gluon.jit
def lse_of(peak, total):
    """The natural logarithm of each row's sum of exponentials. peak: to base 2."""
    return gl.where(total == 0.0, float("-inf"), (peak + gl.log2(gl.where(total == 0.0, 1.0, total))) * LN_2)


@gluon.jit
def store_tile(
    acc, peak, total, o_ptr, lse_ptr, row, first_row, q_len, stride_os, HEAD_DIM: gl.constexpr, HAS_LSE: gl.constexpr
):
    """Divide and write the rows below q_len. acc: (ROWS, DIM). row, peak, total: (ROWS,)."""
    o = divided(acc, total, o_ptr.dtype.element_ty)
    DIM: gl.constexpr = acc.shape[1]
    layout: gl.constexpr = o.type.layout
    o_row = first_row + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    place = o_ptr + o_row.to(gl.int64)[:, None] * stride_os + dim[None, :]
    live = (o_row < q_len)[:, None]
    if HEAD_DIM < DIM:
        live = live & (dim < HEAD_DIM)[None, :]
    gl.store(place, o, mask=live)
    if HAS_LSE:
        gl.store(lse_ptr + row, lse_of(peak, total), mask=row < q_len)
