"""W4A16 matrix product for Hopper (sm_90), written in Gluon: weights stream in and are dequantized in registers.

The product is computed as its transpose, out.T = W x.T. The weights are then the left operand of the tensor cores'
WGMMA, which may come from registers: a thread reads 16 bytes of packed weights and has, with no exchange between
threads, exactly the 32 elements that it must hand over for 64 of K (see `kernels.int4_repack`). And a batch of 1 to 8
wastes at most 7 columns of the right operand instead of 63 rows of the left.

One warp asks the copy engine (TMA) for tiles of weights, of scales and of x, some stages ahead; groups of four warps
compute 64 outputs each. While the tensor cores multiply a block of 64 of K, the group dequantizes the next. Programs
share the work as in Stream-K (Osama et al., arXiv:2301.03598): all steps of all output tiles are laid end to end and
cut into equal chunks. A chunk may end inside a tile; the last program to arrive there adds up the partial sums, always
in the same order.

`kernels.int4_matmul` validates and chooses; its own kernel computes the same and is this one's oracle.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from kernels.hopper_parts import make_barriers
from kernels.int4_hopper_parts import (
    K_BLOCK,
    ROWS,
    chunk,
    chunk_of,
    combine,
    multiply_step,
    store_partial,
    store_tile,
    weights,
)
from kernels.int4_parts import Workspace, share_out
from kernels.int4_repack import ONE_GROUP, Int4Weight
from kernels.validate import tma_strides

barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # Triton 3.6 has the older name


@gluon.jit
def _produce(descs, rings, full, free, problem, GROUP: gl.constexpr):
    """The copying warp."""
    w_desc, s_desc, x_desc = descs
    w_smem, s_smem, x_smem = rings
    tiles_m, tiles_n, k_steps, unit, rows16 = problem[0], problem[1], problem[2], problem[3], problem[6]
    STAGES: gl.constexpr = full.shape[0]
    BLOCKS: gl.constexpr = w_smem.shape[0] // STAGES
    GROUPS: gl.constexpr = s_smem.shape[0] // STAGES
    WARPS: gl.constexpr = w_desc.block_type.shape[0]
    BLOCK_M: gl.constexpr = x_desc.block_type.shape[0]
    W_BYTES: gl.constexpr = BLOCKS * w_desc.block_type.nbytes + GROUPS * s_desc.block_type.nbytes
    BYTES: gl.constexpr = W_BYTES + BLOCKS * x_desc.block_type.nbytes
    begin, stop, _size, _longer = chunk(gl.program_id(0), tiles_m * tiles_n * k_steps // unit)
    for step in range(begin * unit, stop * unit):
        count = step - begin * unit
        slot = count % STAGES
        tile = step // k_steps
        block = step % k_steps * BLOCKS
        tile_n = tile // tiles_m
        bar = full.index(slot)
        mbarrier.wait(free.index(slot), (count // STAGES + 1) & 1)
        mbarrier.expect(bar, BYTES)
        for i in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(
                w_desc, [(block + i) * rows16 + tile_n * WARPS, 0], bar, w_smem.index(slot * BLOCKS + i)
            )
        for i in gl.static_range(GROUPS):
            group = (block * K_BLOCK + i * (BLOCKS * K_BLOCK // GROUPS)) // GROUP
            tma.async_copy_global_to_shared(
                s_desc, [2 * group, tile_n * (8 * WARPS)], bar, s_smem.index(slot * GROUPS + i)
            )
        for i in gl.static_range(BLOCKS):
            tma.async_copy_global_to_shared(
                x_desc, [tile % tiles_m * BLOCK_M, (block + i) * K_BLOCK], bar, x_smem.index(slot * BLOCKS + i)
            )


@gluon.jit
def _compute(common, PART: gl.constexpr):
    """A computing group: rows PART * ROWS onwards of every tile of weights."""
    rings, full, free, outputs, problem = common
    w_smem, s_smem, x_smem = rings
    y_ptr, part_ptr, arrivals_ptr = outputs
    tiles_m, tiles_n, k_steps, unit, m, n = problem[0], problem[1], problem[2], problem[3], problem[4], problem[5]
    STAGES: gl.constexpr = full.shape[0]
    BLOCKS: gl.constexpr = w_smem.shape[0] // STAGES
    GROUPS: gl.constexpr = s_smem.shape[0] // STAGES
    PARTS: gl.constexpr = w_smem.shape[1] // 4
    BLOCK_M: gl.constexpr = x_smem.shape[1]
    SLOT: gl.constexpr = PARTS * ROWS * BLOCK_M  # elements of a partial sum's slot
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_M, 16])
    program = gl.program_id(0)
    begin, stop, size, longer = chunk(program, tiles_m * tiles_n * k_steps // unit)
    step = begin * unit
    count = 0
    while step < stop * unit:
        tile = step // k_steps
        end = gl.minimum(stop * unit, (tile + 1) * k_steps)
        acc = gl.zeros([ROWS, BLOCK_M], gl.float32, acc_layout)
        mbarrier.wait(full.index(count % STAGES), (count // STAGES) & 1)
        w = weights(rings, count % STAGES, 0, PART, BLOCKS, GROUPS)
        for _ in range(end - step - 1):
            acc, w = multiply_step(acc, w, rings, full, free, count, PART, BLOCKS, GROUPS, False)
            count += 1
        acc, w = multiply_step(acc, w, rings, full, free, count, PART, BLOCKS, GROUPS, True)
        count += 1
        first = chunk_of(tile * k_steps // unit, size, longer)
        last = chunk_of((tile * k_steps + k_steps - 1) // unit, size, longer)
        row = tile // tiles_m * (PARTS * ROWS) + PART * ROWS
        col = tile % tiles_m * BLOCK_M
        if first == last:
            store_tile(acc, y_ptr, row, col, m, n)
        else:
            # Two slots a program: of all tiles in its chunk, only the first can have begun before and the last go on.
            slot = 2 * program + (program == first).to(gl.int32)
            parts = part_ptr + PART * (ROWS * BLOCK_M)
            store_partial(acc, parts + slot.to(gl.int64) * SLOT)
            barrier()  # every thread's stores come before the arrival that announces them
            # At most one tile begins in a chunk and goes on, so (first chunk, group) names its counter.
            arrival_ptr = arrivals_ptr + first * PARTS + PART
            if gl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == last - first:
                combine(parts, first, last, y_ptr, row, col, m, n, BLOCK_M, SLOT)
                gl.store(arrival_ptr, 0)
        step = end


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "k_steps", "unit", "m", "rows16"])
def _int4_hopper_kernel(
    w_desc, s_desc, x_desc, y_ptr, part_ptr, arrivals_ptr, tiles_m, tiles_n, k_steps, unit, m, n, rows16,
    GROUP: gl.constexpr, BLOCKS: gl.constexpr, STAGES: gl.constexpr, COPY_REGISTERS: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Program = one SM or half of one, walking over its chunk of steps of BLOCKS * K_BLOCK of K.

    2 * m * n * K FLOPs; reads n * K / 2 bytes of weights and 4 * n * K / GROUP of scales and zeros at least once.
    `arrivals` is all zero before and after. unit: steps that are never parted; it divides k_steps.
    """
    GROUPS: gl.constexpr = max(BLOCKS * 64 // GROUP, 1)
    PARTS: gl.constexpr = w_desc.block_type.shape[0] // 4
    w_smem = gl.allocate_shared_memory(w_desc.dtype, [STAGES * BLOCKS] + w_desc.block_type.shape, w_desc.layout)  # noqa: RUF005 - no stars in a kernel
    s_smem = gl.allocate_shared_memory(s_desc.dtype, [STAGES * GROUPS] + s_desc.block_type.shape, s_desc.layout)  # noqa: RUF005
    x_smem = gl.allocate_shared_memory(x_desc.dtype, [STAGES * BLOCKS] + x_desc.block_type.shape, x_desc.layout)  # noqa: RUF005
    full = make_barriers(STAGES, 1)
    free = make_barriers(STAGES, PARTS)
    fence_async_shared()
    rings = (w_smem, s_smem, x_smem)
    problem = (tiles_m, tiles_n, k_steps, unit, m, n, rows16)
    common = (rings, full, free, (y_ptr, part_ptr, arrivals_ptr), problem)
    copying = ((w_desc, s_desc, x_desc), rings, full, free, problem, GROUP)
    if PARTS == 1:
        gl.warp_specialize([(_compute, (common, 0)), (_produce, copying)], [1], [COPY_REGISTERS])
    elif PARTS == 2:
        gl.warp_specialize(
            [(_compute, (common, 0)), (_compute, (common, 1)), (_produce, copying)],
            [4, 1],
            [REGISTERS, COPY_REGISTERS],
        )
    else:
        gl.warp_specialize(
            [
                (_compute, (common, 0)),
                (_compute, (common, 1)),
                (_compute, (common, 2)),
                (_compute, (common, 3)),
                (_produce, copying),
            ],
            [4, 4, 4, 1],
            [REGISTERS, REGISTERS, REGISTERS, COPY_REGISTERS],
        )


@dataclass(frozen=True)
class Plan:
    """How one shape is launched; any values are correct.

    block_m: rows of x in a tile. parts: computing groups, 64 outputs each. blocks: of 64 of K, in a step; at least 2,
    or the tensor cores' operand has no second set of registers. stages: steps in flight. ctas_per_sm: programs on an
    SM. parting: see share_out.
    """

    block_m: int
    parts: int
    blocks: int
    stages: int
    ctas_per_sm: int = 1
    parting: int = 4

    @property
    def registers(self) -> int | None:
        """Of a thread at the launch: what an SM has, shared out over the threads of its programs."""
        threads = 128 * (self.parts + 1) * self.ctas_per_sm
        return min(255, 65536 // threads // 8 * 8)

    @property
    def computing_registers(self) -> int:
        """Of a thread of a computing group, once the copying warp's four have given up theirs."""
        assert self.registers is not None
        return min(240, (self.registers * (self.parts + 1) - COPY_REGISTERS) // self.parts // 8 * 8)


COPY_REGISTERS = 24


LARGE = 100 * 2**20  # elements: from here on, a chunk is long enough to fill deep pipelines of wide tiles


def plan_for(m: int, n: int, k: int, num_sms: int = 132) -> Plan:
    """The launch that was fastest on an H200, or within a few percent of it, for m rows of x, n outputs and k inputs.

    Up to 64 tokens: small programs for small matrices, which fill the SMs sooner, wide ones for large. Up to 128: by
    how much of the GPU the outputs fill. More: see `_fewest_waves`.
    """
    large = n * k > LARGE
    if m <= 8:
        return Plan(8, parts=4, blocks=4, stages=4) if large else Plan(8, parts=1, blocks=4, stages=4, ctas_per_sm=4)
    if m <= 16:
        return Plan(16, parts=4, blocks=4, stages=4) if large else Plan(16, parts=2, blocks=4, stages=4, ctas_per_sm=2)
    if m <= 32:
        return Plan(32, parts=4, blocks=4, stages=3) if large else Plan(32, parts=2, blocks=4, stages=6)
    if m <= 64:
        return Plan(64, parts=4, blocks=4, stages=3) if large else Plan(64, parts=2, blocks=4, stages=4)
    if m > 128:
        return _fewest_waves(m, n, num_sms)
    if 2 * triton.cdiv(n, ROWS.value) <= num_sms:
        return Plan(64, parts=1, blocks=4, stages=3, parting=16)
    tiles_n = triton.cdiv(n, 2 * ROWS.value)
    if tiles_n >= num_sms:  # no tile is parted
        return Plan(128, parts=2, blocks=4, stages=2, parting=16)
    if 2 * tiles_n > num_sms:  # the same, since more than half of the SMs have one
        return Plan(128, parts=2, blocks=4, stages=2, parting=8)
    return Plan(128, parts=2, blocks=2, stages=5, parting=8)


WAVES = (
    (1.7, Plan(256, parts=2, blocks=2, stages=3, parting=40)),
    (1.0, Plan(128, parts=2, blocks=4, stages=2)),
    (1.37, Plan(64, parts=2, blocks=2, stages=4, ctas_per_sm=2)),
    (0.79, Plan(64, parts=2, blocks=4, stages=4)),
)
"""What one tile in every place of an H200 takes, beside tiles of 128 tokens, and how such tiles are launched. Tall ones
dequantize less often; short ones waste less where they fill the last wave."""


def _fewest_waves(m: int, n: int, num_sms: int) -> Plan:
    """The plan of WAVES that ends first: tiles are handed out in waves, one to every place on the GPU."""

    def time(choice: tuple[float, Plan]) -> float:
        wave, plan = choice
        tiles = triton.cdiv(m, plan.block_m) * triton.cdiv(n, plan.parts * ROWS.value)
        return wave * triton.cdiv(tiles, num_sms * plan.ctas_per_sm)

    return min(WAVES, key=time)[1]


def unsupported(x: torch.Tensor) -> str | None:
    """Why this kernel cannot take x, which is valid; None if it can."""
    if not x.is_cuda or torch.cuda.get_device_capability(x.device)[0] != 9:
        return "it needs a Hopper GPU (sm_90)"
    if x.data_ptr() % 16 or x.stride(0) % 8:
        return "its rows must begin at multiples of 16 bytes"
    return None


def launch(
    x: torch.Tensor, weight: Int4Weight, y: torch.Tensor, workspace: Workspace | None = None, plan: Plan | None = None
) -> None:
    """Compute what `kernels.int4_matmul.int4_matmul` promises, of arguments that it found right.

    x: [m, in_features]. y: [m, out_features], contiguous.
    """
    m, n = x.shape[0], weight.out_features
    num_sms = torch.cuda.get_device_properties(x.device).multi_processor_count
    plan = plan or plan_for(m, n, x.shape[1], num_sms)
    group = ONE_GROUP if weight.group_size == weight.in_features else weight.group_size
    k_blocks, rows16, _ = weight.words.shape
    tiles_m, tiles_n = triton.cdiv(m, plan.block_m), triton.cdiv(n, plan.parts * ROWS.value)
    k_steps = triton.cdiv(k_blocks, plan.blocks)
    programs, unit = share_out(tiles_m * tiles_n, k_steps, num_sms * plan.ctas_per_sm, plan.parting)
    elements = 2 * programs * plan.parts * ROWS.value * plan.block_m
    workspace = Workspace.of(workspace, x.device, elements, programs * plan.parts)
    dtype = gl.float16 if x.dtype == torch.float16 else gl.bfloat16
    plain = gl.NVMMASharedLayout(0, 32, 2)
    x_block = [plan.block_m, K_BLOCK.value]
    _int4_hopper_kernel[(programs,)](
        _descriptor(weight.words.view(-1, 128), [4 * plan.parts, 128], plain),
        _descriptor(weight.scale_zeros.flatten(0, 1), [2, 32 * plan.parts], plain),
        _descriptor(x, x_block, gl.NVMMASharedLayout.get_default_for(x_block, dtype)),
        y, workspace.parts, workspace.arrivals, tiles_m, tiles_n, k_steps, unit, m, n, rows16,
        GROUP=group, BLOCKS=plan.blocks, STAGES=plan.stages, COPY_REGISTERS=COPY_REGISTERS,
        REGISTERS=plan.computing_registers, num_warps=4, maxnreg=plan.registers,
    )  # fmt: skip


def _descriptor(t: torch.Tensor, block: list[int], layout: gl.NVMMASharedLayout) -> TensorDescriptor:
    return TensorDescriptor(t, list(t.shape), tma_strides(t), block, layout)
