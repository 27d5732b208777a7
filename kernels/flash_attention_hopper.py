"""FlashAttention, forward, for Hopper (sm_90): copies, tensor cores and softmax at the same time, written in Gluon.

FlashAttention-3 (Shah et al., arXiv:2407.08608) in three moves. Warps specialise: one warp does nothing but ask the
copy engine (TMA) for tiles, and two or three groups of four warps compute, 64 queries each, so that one group's softmax
runs beside another's matrix products. Within a group, the scores of the next tile are asked of the tensor cores
(WGMMA) before the softmax of this one begins. And one program per SM walks over many tiles of queries, so that the
first loads of a tile overlap the last stores of the one before.

`kernels.flash_attention` validates and chooses; its own kernel computes the same and is this one's oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper_parts import (
    ROWS,
    attend,
    load_tile,
    make_barriers,
    make_ring,
    num_kv_tiles,
    num_units,
    store_tile,
    unit_of,
)
from kernels.validate import tma_strides

LOG2_E = 1.4426950408889634


@gluon.jit
def _produce(descs, rings, q_free, free, problem, HEADS_PER_KV: gl.constexpr, CAUSAL: gl.constexpr):
    """The copying warp. KV tiles go from the last, which has the diagonal, to the first."""
    q_desc, k_desc, v_desc = descs
    q_ring, k_ring, v_ring = rings
    q_smem, q_full = q_ring
    num_heads, num_pairs, tiles_m, q_len, k_len = problem
    GROUPS: gl.constexpr = q_smem.shape[0]
    BLOCK_M: gl.constexpr = ROWS * GROUPS
    BLOCK_N: gl.constexpr = k_desc.block_type.shape[1]
    turn = 0
    count = 0
    for unit in range(gl.program_id(0), num_units(num_pairs, tiles_m, CAUSAL), gl.num_programs(0)):
        pair, first, stop, step = unit_of(unit, tiles_m, CAUSAL)
        batch = pair // num_heads
        head = pair % num_heads
        kv_head = head // HEADS_PER_KV
        for tile_m in range(first, stop, step):
            num_tiles = num_kv_tiles(tile_m, q_len, k_len, BLOCK_M, BLOCK_N, CAUSAL)
            row = (num_tiles - 1) * BLOCK_N
            for group in gl.static_range(GROUPS):
                mbarrier.wait(q_free.index(group), (turn + 1) & 1)
                mbarrier.expect(q_full.index(group), q_desc.block_type.nbytes)
                tma.async_copy_global_to_shared(
                    q_desc, [batch, tile_m * BLOCK_M + group * ROWS, head, 0], q_full.index(group), q_smem.index(group)
                )
                if group == 0:
                    load_tile(k_desc, batch, row, kv_head, k_ring, count, free, count)
            for _ in range(num_tiles - 1):  # in the order of need. Step i is done with K tile i and V tile i - 1
                load_tile(k_desc, batch, row - BLOCK_N, kv_head, k_ring, count + 1, free, count + 1)
                load_tile(v_desc, batch, row, kv_head, v_ring, count, free, count + 1)
                row -= BLOCK_N
                count += 1
            load_tile(v_desc, batch, row, kv_head, v_ring, count, free, count + 1)
            count += 1
            turn += 1


@gluon.jit
def _compute(
    common, GROUP: gl.constexpr, HEAD_DIM: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """A computing group: rows GROUP * ROWS onwards of every tile of queries."""
    rings, q_free, free, turns, outputs, problem, qk_scale = common
    q_ring, k_ring, v_ring = rings
    o_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh = outputs
    num_heads, num_pairs, tiles_m, q_len, k_len = problem
    q_smem, q_full = q_ring
    k_smem = k_ring[0]
    BLOCK_M: gl.constexpr = ROWS * q_smem.shape[0]
    BLOCK_N: gl.constexpr = k_smem.shape[2]
    DIM: gl.constexpr = k_smem.shape[4]
    score_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    row_layout: gl.constexpr = gl.SliceLayout(1, score_layout)
    q = q_smem.index(GROUP).reshape([ROWS, DIM])
    turn = 0  # of query tiles
    count = 0  # of KV tiles
    for unit in range(gl.program_id(0), num_units(num_pairs, tiles_m, CAUSAL), gl.num_programs(0)):
        pair, first, stop, step = unit_of(unit, tiles_m, CAUSAL)
        batch = (pair // num_heads).to(gl.int64)
        head = (pair % num_heads).to(gl.int64)
        for tile_m in range(first, stop, step):
            num_tiles = num_kv_tiles(tile_m, q_len, k_len, BLOCK_M, BLOCK_N, CAUSAL)
            first_row = tile_m * BLOCK_M + GROUP * ROWS
            row = first_row + gl.arange(0, ROWS, row_layout)
            last_key = row * 0 + (k_len - 1)
            whole = k_len // BLOCK_N  # KV tiles that all of this group's queries see
            if CAUSAL:
                last_key = gl.minimum(row + k_len - q_len, k_len - 1)
                whole = gl.minimum(whole, gl.maximum(first_row + k_len - q_len + 1, 0) // BLOCK_N)
            masked = gl.maximum(num_tiles - whole, 1)  # the first always, which costs little
            mbarrier.wait(q_full.index(GROUP), turn & 1)
            acc, peak, total, count = attend(
                q, k_ring, v_ring, q_free, free, turns, count, turn, num_tiles, masked, last_key, None, qk_scale,
                GROUP, PING_PONG,
            )  # fmt: skip
            turn += 1
            store_tile(
                acc, peak, total, o_ptr + batch * stride_ob + head * stride_oh,
                lse_ptr + batch * stride_lb + head * stride_lh if HAS_LSE else lse_ptr, row, first_row, q_len,
                stride_os, HEAD_DIM, HAS_LSE,
            )  # fmt: skip


@gluon.jit(do_not_specialize=["num_heads", "num_pairs", "tiles_m", "q_len", "k_len", "stride_lb", "stride_lh"])
def _hopper_kernel(
    q_desc, k_desc, v_desc, o_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh, qk_scale,
    num_heads, num_pairs, tiles_m, q_len, k_len, HEAD_DIM: gl.constexpr, HEADS_PER_KV: gl.constexpr,
    GROUPS: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr, PING_PONG: gl.constexpr,
    HAS_LSE: gl.constexpr,
):  # fmt: skip
    """Program = one SM, walking over tiles of GROUPS * ROWS queries of one of the num_pairs = batch * num_heads heads.

    4 * q_len * k_len * DIM FLOPs per head, half of it if CAUSAL. DIM, a power of two: what is beyond HEAD_DIM is zeros.
    """
    descs = (q_desc, k_desc, v_desc)
    rings = (make_ring(GROUPS, q_desc), make_ring(STAGES, k_desc), make_ring(STAGES, v_desc))
    q_free = make_barriers(GROUPS, 1)
    free = make_barriers(STAGES, GROUPS)
    turns = make_barriers(GROUPS, 1)
    fence_async_shared()
    if PING_PONG:
        mbarrier.arrive(turns.index(0), count=1)
    outputs = (o_ptr, lse_ptr, stride_ob, stride_os, stride_oh, stride_lb, stride_lh)
    problem = (num_heads, num_pairs, tiles_m, q_len, k_len)
    copying = (descs, rings, q_free, free, problem, HEADS_PER_KV, CAUSAL)
    common = (rings, q_free, free, turns, outputs, problem, qk_scale)
    # Registers a thread: the copying warp gives up most of its own, so that scores and outputs fit the others'.
    if GROUPS == 2:
        gl.warp_specialize(
            [
                (_compute, (common, 0, HEAD_DIM, CAUSAL, PING_PONG, HAS_LSE)),
                (_compute, (common, 1, HEAD_DIM, CAUSAL, PING_PONG, HAS_LSE)),
                (_produce, copying),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (common, 0, HEAD_DIM, CAUSAL, PING_PONG, HAS_LSE)),
                (_compute, (common, 1, HEAD_DIM, CAUSAL, PING_PONG, HAS_LSE)),
                (_compute, (common, 2, HEAD_DIM, CAUSAL, PING_PONG, HAS_LSE)),
                (_produce, copying),
            ],
            [4, 4, 1],
            [160, 160, 32],
        )


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct.

    block_n: keys in a tile. groups: computing groups, 64 queries each. stages: tiles of K, and of V, in flight.
    ping_pong: the groups take turns at the tensor cores.
    """

    block_n: int
    groups: int
    stages: int
    ping_pong: bool


def plan_for(head_dim: int) -> Plan:
    """The launch that was fastest on an H200."""
    if head_dim == 64:  # less to multiply for as many exponentials: a third group hides more of them
        return Plan(block_n=64, groups=3, stages=4, ping_pong=True)
    return Plan(block_n=128 if head_dim <= 128 else 64, groups=2, stages=2, ping_pong=False)


def unsupported(q: torch.Tensor, k: torch.Tensor, packed: bool) -> str | None:
    """Why this kernel cannot compute attention of q and k, which are valid; None if it can."""
    if not q.is_cuda or torch.cuda.get_device_capability(q.device)[0] != 9:
        return "it needs a Hopper GPU (sm_90)"
    if packed:
        return "it has no packed sequences"
    if q.dtype == torch.float32:
        return "its tensor cores take float16 and bfloat16, not float32"
    return None if q.shape[-1] >= 64 else f"it has head_dim 64 to 256, not {q.shape[-1]}"


def faster(q: torch.Tensor, k: torch.Tensor) -> bool:
    """Whether this kernel beat kernels.flash_attention's on an H200 where both can run.

    Not with narrow heads, where exponentials and not the tensor cores are the limit; nor with few keys, which give the
    pipeline no time to fill; nor where its large tiles of queries are too few for all SMs.
    """
    batch, q_len, num_heads, head_dim = q.shape
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    tiles = batch * num_heads * triton.cdiv(q_len, 2 * ROWS.value)
    return head_dim > 64 and k.shape[1] >= 512 and tiles >= programs


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, causal: bool,
    scale: float, plan: Plan | None = None,
) -> None:  # fmt: skip
    """Compute what `kernels.flash_attention.flash_attention` promises, of arguments that it found right."""
    batch, q_len, num_heads, head_dim = q.shape
    plan = plan or plan_for(head_dim)
    tiles_m = triton.cdiv(q_len, plan.groups * ROWS.value)
    programs = torch.cuda.get_device_properties(q.device).multi_processor_count
    _hopper_kernel[(min(programs, batch * num_heads * tiles_m),)](
        *(_descriptor(x, rows) for x, rows in ((q, ROWS.value), (k, plan.block_n), (v, plan.block_n))),
        out, lse, *out.stride()[:3], *(lse.stride()[:2] if lse is not None else (0, 0)), scale * LOG2_E,
        num_heads, batch * num_heads, tiles_m, q_len, k.shape[1],
        HEAD_DIM=head_dim, HEADS_PER_KV=num_heads // k.shape[2], GROUPS=plan.groups, STAGES=plan.stages, CAUSAL=causal,
        PING_PONG=plan.ping_pong, HAS_LSE=lse is not None, num_warps=4,
    )  # fmt: skip


def _descriptor(x: torch.Tensor, rows: int) -> TensorDescriptor:
    """Of the tiles of `rows` tokens of one head of x: [batch, tokens, heads, head_dim].

    Tiles are a power of two wide, which WGMMA's layouts want; TMA fills what is beyond head_dim with zeros.
    """
    block = [1, rows, 1, triton.next_power_of_2(x.shape[3])]
    layout = gl.NVMMASharedLayout.get_default_for(block, gl.float16 if x.dtype == torch.float16 else gl.bfloat16)
    return TensorDescriptor(x, list(x.shape), tma_strides(x), block, layout)
