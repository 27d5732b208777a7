"""Prefill over a paged KV cache for Hopper (sm_90): `kernels.flash_attention_hopper`, with its tiles gathered by TMA.

A tile of keys is several blocks of the cache, each of which the copy engine fetches by itself: its box is one block of
one head, 64 dimensions wide, as wide as shared memory's rows are when swizzled for WGMMA. What a box has beyond the
cache's own bounds arrives as zeros, and that is how the last block of a sequence is kept clean of the stale values in
its unused slots: its box begins before the block's first slot, by as many rows as are unused, so that zeros come first
and the block's last row is the sequence's last key. The mask knows (`tail`).

`kernels.flash_attention_paged` validates and chooses; its own kernel computes the same and is this one's oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper_parts import ROWS, attend, cdiv, divided, lse_of, make_barriers, make_ring
from kernels.validate import tma_strides

LOG2_E = 1.4426950408889634
GROUPS = gl.constexpr(2)  # computing groups, ROWS queries each
PANEL = gl.constexpr(64)  # 16-bit elements in a row of 128 bytes: the widest that shared memory swizzles


@gluon.jit
def _chunk_of(unit, lengths, num_tiles, num_kv_heads, TOKENS: gl.constexpr):
    """The unit's KV head, sequence, first token in the chunk, the chunk's first query and length, the sequence's.

    As kernels.flash_attention.locate. Neighbours are the heads of one tile, and long tiles of a chunk come first.
    """
    cu_q_ptr, seq_lens_ptr, num_seqs = lengths
    tile = num_tiles - 1 - unit // num_kv_heads
    low = 0
    high = num_seqs
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(cu_q_ptr + middle) // TOKENS + middle <= tile:
            low = middle
        else:
            high = middle
    first_query = gl.load(cu_q_ptr + low)
    first_token = (tile - (first_query // TOKENS + low)) * TOKENS
    q_len = gl.load(cu_q_ptr + low + 1) - first_query
    return unit % num_kv_heads, low, first_token, first_query, q_len, gl.load(seq_lens_ptr + low)


@gluon.jit
def _num_kv_tiles(first_token, q_len, seq_len, TOKENS: gl.constexpr, BLOCK_N: gl.constexpr):
    """KV tiles that some token of the tile sees; at least one."""
    end = gl.minimum(seq_len, first_token + TOKENS + seq_len - q_len)
    return gl.maximum(cdiv(gl.maximum(end, 0), BLOCK_N), 1)


@gluon.jit
def _load_blocks(desc, ring, place, row, count, free, step, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr):
    """Ask for tile `count` of a ring, which begins with key `row`, block by block."""
    panels, full = ring
    table_ptr, seq_len, num_blocks, kv_head = place
    STAGES: gl.constexpr = free.shape[0]
    BOX: gl.constexpr = panels.shape[2]
    BOXES: gl.constexpr = BLOCK_N // BOX
    PANELS: gl.constexpr = panels.shape[0] // (STAGES * BOXES)
    slot = count % STAGES
    blocks = ()
    for i in gl.static_range(BOXES):  # all asked for before the first is needed
        key = row + i * BOX
        # Behind the sequence, a block that does not exist: zeros.
        blocks += (gl.load(table_ptr + key // BLOCK_SIZE, mask=key < seq_len, other=num_blocks),)  # type: ignore
    mbarrier.wait(free.index(step % STAGES), (step // STAGES + 1) & 1)
    mbarrier.expect(full.index(slot), PANELS * BOXES * desc.block_type.nbytes)
    for i in gl.static_range(BOXES):
        key = row + i * BOX
        first = key % BLOCK_SIZE + gl.minimum(gl.maximum(seq_len - key, 0) - BOX, 0)
        for panel in gl.static_range(PANELS):
            tma.async_copy_global_to_shared(
                desc, [blocks[i], first, kv_head, panel * PANEL], full.index(slot),
                panels.index((slot * PANELS + panel) * BOXES + i),
            )  # fmt: skip


@gluon.jit
def _produce(
    descs, rings, q_free, free, lengths, table, problem,
    GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BLOCK_N: gl.constexpr,
):  # fmt: skip
    """The copying warp. KV tiles go from the last, which has the diagonal, to the first."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = rings
    q_smem, q_full = q_ring
    table_ptr, stride_table, num_blocks = table
    num_tiles, num_kv_heads = problem
    TOKENS: gl.constexpr = ROWS * GROUPS // GROUP_SIZE
    turn = 0
    count = 0
    for unit in range(gl.program_id(0), num_tiles * num_kv_heads, gl.num_programs(0)):
        kv_head, seq, first_token, first_query, q_len, seq_len = _chunk_of(
            unit, lengths, num_tiles, num_kv_heads, TOKENS
        )
        if first_token < q_len:
            place = (table_ptr + seq.to(gl.int64) * stride_table, seq_len, num_blocks, kv_head)
            tiles = _num_kv_tiles(first_token, q_len, seq_len, TOKENS, BLOCK_N)
            row = (tiles - 1) * BLOCK_N
            for group in gl.static_range(GROUPS):
                mbarrier.wait(q_free.index(group), (turn + 1) & 1)
                mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
                token = first_query + first_token + group * (ROWS // GROUP_SIZE)
                tma.async_copy_global_to_shared(
                    q_desc, [token, kv_head * GROUP_SIZE, 0], q_full.index(group), q_smem.index(group)
                )
                if group == 0:
                    _load_blocks(k_desc, k_ring, place, row, count, free, count, BLOCK_SIZE, BLOCK_N)
            for _ in range(tiles - 1):  # in the order of need. Step i is done with K tile i and V tile i - 1
                _load_blocks(
                    k_desc, k_ring, place, row - BLOCK_N, count + 1, free, count + 1, BLOCK_SIZE, BLOCK_N
                )  # fmt: skip
                _load_blocks(v_desc, v_ring, place, row, count, free, count + 1, BLOCK_SIZE, BLOCK_N)
                row -= BLOCK_N
                count += 1
            _load_blocks(v_desc, v_ring, place, row, count, free, count + 1, BLOCK_SIZE, BLOCK_N)
            count += 1
            turn += 1


@gluon.jit
def _store(acc, peak, total, outputs, first_query, first_token, q_len, kv_head, GROUP_SIZE: gl.constexpr):
    """Divide and write the rows of tokens below q_len. acc: (ROWS, DIM). peak, total: (ROWS,)."""
    o_ptr, lse_ptr, stride_ot, stride_oh, stride_lh = outputs
    o = divided(acc, total, o_ptr.dtype.element_ty)
    layout: gl.constexpr = o.type.layout
    row = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dim = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
    token = first_token + row // GROUP_SIZE
    head = (kv_head * GROUP_SIZE + row % GROUP_SIZE).to(gl.int64)
    place = o_ptr + ((first_query + token).to(gl.int64) * stride_ot + head * stride_oh)[:, None] + dim[None, :]
    gl.store(place, o, mask=(token < q_len)[:, None])
    if lse_ptr is not None:
        lse = gl.convert_layout(lse_of(peak, total), gl.SliceLayout(1, layout))
        gl.store(lse_ptr + head * stride_lh + first_query + token, lse, mask=token < q_len)


@gluon.jit
def _compute(
    common, GROUP: gl.constexpr, GROUP_SIZE: gl.constexpr, BOX: gl.constexpr, PING_PONG: gl.constexpr
):  # fmt: skip
    """A computing group: rows GROUP * ROWS onwards of every tile of queries."""
    rings, q_free, free, turns, outputs, lengths, problem, qk_scale = common
    q_ring, k_ring, v_ring = rings
    num_tiles, num_kv_heads = problem
    q_smem, q_full = q_ring
    TOKENS: gl.constexpr = ROWS * GROUPS // GROUP_SIZE
    BLOCK_N: gl.constexpr = k_ring[0].shape[2]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row = gl.arange(0, ROWS, gl.SliceLayout(1, score_layout))
    q = q_smem.index(GROUP).reshape([ROWS, k_ring[0].shape[4]])
    turn = 0  # of query tiles
    count = 0  # of KV tiles
    for unit in range(gl.program_id(0), num_tiles * num_kv_heads, gl.num_programs(0)):
        kv_head, _seq, first_token, first_query, q_len, seq_len = _chunk_of(
            unit, lengths, num_tiles, num_kv_heads, TOKENS
        )
        if first_token < q_len:
            tiles = _num_kv_tiles(first_token, q_len, seq_len, TOKENS, BLOCK_N)
            own_token = first_token + GROUP * (ROWS // GROUP_SIZE)
            before = seq_len - q_len  # tokens that were in the cache before the chunk
            last_key = gl.minimum(own_token + row // GROUP_SIZE + before, seq_len - 1)
            whole = gl.minimum(seq_len, gl.maximum(own_token + before + 1, 0)) // BLOCK_N  # tiles that all rows see
            tail_start = gl.maximum(seq_len - 1, 0) // BOX * BOX
            mbarrier.wait(q_full.index(GROUP), turn & 1)
            acc, peak, total, count = attend(
                q, k_ring, v_ring, q_free, free, turns, count, turn, tiles, gl.maximum(tiles - whole, 1), last_key,
                (tail_start, tail_start + BOX - seq_len), qk_scale, GROUP, PING_PONG,
            )  # fmt: skip
            turn += 1
            _store(acc, peak, total, outputs, first_query, own_token, q_len, kv_head, GROUP_SIZE)


@gluon.jit
def _make_ring(STAGES: gl.constexpr, desc, BOX: gl.constexpr, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Shared memory for tiles as the copies see it, box by box, and as the products do; and its barriers.

    A tile that is swizzled for WGMMA lies panel by panel, 64 elements wide and BLOCK_N rows long, so that the boxes of
    a panel are neighbours.
    """
    boxes: gl.constexpr = STAGES * (DIM // PANEL) * (BLOCK_N // BOX)
    panels = gl.allocate_shared_memory(desc.dtype, [boxes, 1, BOX, 1, PANEL], desc.layout)
    tiles = panels._reinterpret(desc.dtype, [STAGES, 1, BLOCK_N, 1, DIM], desc.layout)
    return panels, tiles, make_barriers(STAGES, 1)


@gluon.jit(do_not_specialize=["num_seqs", "num_tiles", "num_kv_heads", "num_blocks", "stride_table", "stride_lh"])
def _paged_hopper_kernel(
    q_desc, k_desc, v_desc, table_ptr, seq_lens_ptr, cu_q_ptr, o_ptr, lse_ptr, stride_table, stride_ot, stride_oh,
    stride_lh, qk_scale, num_seqs, num_tiles, num_kv_heads, num_blocks,
    HEAD_DIM: gl.constexpr, GROUP_SIZE: gl.constexpr, BLOCK_SIZE: gl.constexpr, BOX: gl.constexpr,
    BLOCK_N: gl.constexpr, STAGES: gl.constexpr, PING_PONG: gl.constexpr,
):  # fmt: skip
    """Program = one SM, walking over (tile, KV head). Row r of a tile is token r // GROUP_SIZE, head r % GROUP_SIZE."""
    descs = (q_desc, k_desc, v_desc)
    q_ring = make_ring(GROUPS, q_desc)
    k_panels, k_tiles, k_full = _make_ring(STAGES, k_desc, BOX, BLOCK_N, HEAD_DIM)
    v_panels, v_tiles, v_full = _make_ring(STAGES, v_desc, BOX, BLOCK_N, HEAD_DIM)
    q_free = make_barriers(GROUPS, 1)
    free = make_barriers(STAGES, GROUPS)
    turns = make_barriers(GROUPS, 1)
    fence_async_shared()
    if PING_PONG:
        mbarrier.arrive(turns.index(0), count=1)
    outputs = (o_ptr, lse_ptr, stride_ot, stride_oh, stride_lh)
    lengths = (cu_q_ptr, seq_lens_ptr, num_seqs)
    problem = (num_tiles, num_kv_heads)
    copies = (q_ring, (k_panels, k_full), (v_panels, v_full))
    table = (table_ptr, stride_table, num_blocks)
    rings = (q_ring, (k_tiles, k_full), (v_tiles, v_full))
    common = (rings, q_free, free, turns, outputs, lengths, problem, qk_scale)
    gl.warp_specialize(
        [
            (_compute, (common, 0, GROUP_SIZE, BOX, PING_PONG)),
            (_compute, (common, 1, GROUP_SIZE, BOX, PING_PONG)),
            # Constants are constants only where they are written into the call.
            (_produce, (descs, copies, q_free, free, lengths, table, problem, GROUP_SIZE, BLOCK_SIZE, BLOCK_N)),
        ],
        [4, 1],
        [232, 40],
    )


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct. As kernels.flash_attention_hopper.Plan, with two groups."""

    block_n: int
    stages: int
    ping_pong: bool


def plan_for(head_dim: int) -> Plan:
    """The launch that was fastest on an H200."""
    return Plan(block_n=128 if head_dim <= 128 else 64, stages=2, ping_pong=False)


def unsupported(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor) -> str | None:
    """Why this kernel cannot run with these arguments, which are valid; None if it can."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "it needs a Hopper GPU (sm_90)"
    if q.dtype == torch.float32:
        return "its tensor cores take float16 and bfloat16, not float32"
    _, block_size, num_kv_heads, head_dim = k_cache.shape
    if head_dim < PANEL.value:
        return f"it has head_dim 64 to 256, not {head_dim}"
    if block_size < 8 or block_size & (block_size - 1):
        return f"it has block sizes that are powers of two from 8 on, not {block_size}"
    group = q.shape[1] // num_kv_heads
    if group > ROWS.value or group & (group - 1):
        return f"it has 1, 2, 4 ... 64 query heads to a KV head, not {group}"
    for name, x in (("q", q), ("k_cache", k_cache), ("v_cache", v_cache)):
        if x.data_ptr() % 16 or any(step % 8 for step in tma_strides(x)[:-1]):
            return f"its copy engine takes rows that begin at multiples of 16 bytes, and those of {name} do not"
    return None


def faster(q: torch.Tensor, seq_lens: torch.Tensor) -> bool:
    """Whether this kernel beat kernels.flash_attention_paged's on an H200 where both can run: not for decode alone."""
    return q.shape[0] >= 4 * seq_lens.shape[0]


def launch(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, scale: float, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Compute what `kernels.flash_attention_paged.paged_prefill` promises, of arguments that it found right."""
    num_tokens, num_heads, head_dim = q.shape
    num_blocks, block_size, num_kv_heads, _ = k_cache.shape
    group = num_heads // num_kv_heads
    plan = plan or plan_for(head_dim)
    num_tiles = num_tokens // (GROUPS.value * ROWS.value // group) + seq_lens.shape[0]
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    box = [1, min(block_size, plan.block_n), 1, PANEL.value]
    _paged_hopper_kernel[(min(programs, num_tiles * num_kv_heads),)](
        _descriptor(q, [ROWS.value // group, group, head_dim]), _descriptor(k_cache, box), _descriptor(v_cache, box),
        block_table, seq_lens, cu_seqlens_q, out, lse, block_table.stride(0), *out.stride()[:2],
        lse.stride(0) if lse is not None else 0, scale * LOG2_E, seq_lens.shape[0], num_tiles, num_kv_heads,
        num_blocks, HEAD_DIM=head_dim, GROUP_SIZE=group, BLOCK_SIZE=block_size, BOX=box[1], BLOCK_N=plan.block_n,
        STAGES=plan.stages, PING_PONG=plan.ping_pong, num_warps=4,
    )  # fmt: skip


def _descriptor(x: torch.Tensor, box: list[int]) -> TensorDescriptor:
    layout = gl.NVMMASharedLayout.get_default_for(box, gl.float16 if x.dtype == torch.float16 else gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), tma_strides(x), box, layout)
