"""What the checks of lab 2 say to right answers in another style, which no mutant can be."""

import math

import torch

import labkit
from labkit import device
from labkit.checks.rounded import Rounded

device.tier()  # without a GPU, kernels decorated from here on run in the interpreter

import triton  # noqa: E402
import triton.language as tl  # noqa: E402


def accepted(question: str, answer) -> None:
    result = labkit.check(question, answer)
    assert all(row.passed for row in result.rows), f"a right answer is refused:\n{result}"


@triton.jit
def softmax_in_base_2(x_ptr, out_ptr, x_stride, out_stride, n_cols, BLOCK: tl.constexpr):
    row, cols = tl.program_id(0), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + row * x_stride + cols, mask=cols < n_cols, other=float("-inf")).to(tl.float32)
    x *= 1.4426950408889634
    p = tl.exp2(x - tl.max(x, axis=0))
    out = p * (1 / tl.sum(p, axis=0))
    tl.store(out_ptr + row * out_stride + cols, out.to(out_ptr.dtype.element_ty), mask=cols < n_cols)


def row_softmax(x):
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = triton.next_power_of_2(x.shape[1])
    softmax_in_base_2[(len(x),)](x, out, x.stride(0), out.stride(0), x.shape[1], BLOCK=block)
    return out


def test_a_row_softmax_may_use_exp2_and_multiply_before_it_subtracts():
    accepted("row_softmax", row_softmax)


def test_a_configuration_may_be_copied_before_it_is_compiled():
    def programs(r, warps):
        regs = 4 * (16384 // (-(-r.registers // 8) * 256)) // warps
        return min(regs, 233472 // (-(-(r.shared_bytes + 1024) // 128) * 128), 64 // warps, 32)

    def choose_config(candidates, report, min_programs):
        kept = []
        for config in candidates:
            try:
                found = report(dict(config))
            except RuntimeError:
                continue
            n = programs(found, config["num_warps"])
            if not found.spills and n >= min_programs:
                kept.append((config["block_m"], n, dict(config)))
        if not kept:
            raise ValueError("no candidate is within the limits")
        return max(kept, key=lambda entry: entry[:2])[2]

    accepted("choose_config", choose_config)


def test_a_softmax_may_multiply_by_the_reciprocal_of_its_sum():
    def softmax_base2(scores, scale):
        s = scores.float().mul(scale * 1.4426950408889634)
        p = torch.exp2(s - s.amax(-1, keepdim=True))
        return p * (1 / p.sum(-1, keepdim=True))

    accepted("softmax_base2", softmax_base2)


def test_a_stall_point_may_be_found_among_all_powers_of_two_at_once():
    def stall_point(dtype):
        powers = (2.0 ** torch.arange(60, dtype=torch.float64)).to(dtype)
        return int(powers[(powers + 1) - powers == 0][0])

    accepted("stall_point", stall_point)


def test_a_stall_point_may_be_found_in_place_and_one_by_one():
    def stall_point(dtype):
        total, step = torch.full((1,), 256.0, dtype=dtype), dtype == torch.float32
        while not torch.equal(before := total.clone(), total.add_(1)):
            if before >= 2**15 and step:  # 16 million steps are too many for a test
                total.copy_(before * 2)
        return int(before)

    accepted("stall_point", stall_point)


def test_results_are_rounded_as_in_a_format_of_that_width():
    x = torch.randn(4096, generator=torch.Generator().manual_seed(1)) * 8
    ties = torch.tensor([2049.0, 2051.0, -2049.0, 4098.0, math.inf, 0.0])
    for values in (x[x.abs() > 1e-3], ties):
        for dtype, bits in ((torch.float16, 11), (torch.bfloat16, 8)):
            for wide in (torch.float32, torch.float64):
                given = values.to(wide)
                with Rounded(wide, bits):
                    rounded, in_place = given + 0.0, given.clone().mul_(1.0)
                assert torch.equal(rounded, values.to(dtype).to(wide)), f"{wide} rounded to {bits} bits is not {dtype}"
                assert torch.equal(in_place, rounded), "an operation in place is rounded as well"


@triton.jit
def in_two_loops(
    q_ptr, k_ptr, v_ptr, o_ptr, scale, seq_q, seq_k,
    q_row, q_head, k_row, k_head, v_row, v_head, o_row, o_head,
    GROUP: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HEAD_DIM: tl.constexpr,
):  # fmt: skip
    head, dims = tl.program_id(1), tl.arange(0, HEAD_DIM)
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    at_q = head * q_head + rows[:, None] * q_row + dims[None, :]
    q = tl.load(q_ptr + at_q, mask=rows[:, None] < seq_q, other=0.0)
    m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l = tl.zeros((BLOCK_M,), tl.float32)  # noqa: E741
    acc = tl.zeros((BLOCK_M, HEAD_DIM), tl.float32)
    first = tl.program_id(0) * BLOCK_M + seq_k - seq_q  # the last column that the first row sees
    unmasked = (first + 1) // BLOCK_N
    for part in tl.static_range(2):
        begin = 0 if part == 0 else unmasked
        end = unmasked if part == 0 else tl.cdiv(tl.minimum(seq_k, first + BLOCK_M), BLOCK_N)
        for tile in range(begin, end):
            cols = tile * BLOCK_N + tl.arange(0, BLOCK_N)
            at_k = head // GROUP * k_head + cols[None, :] * k_row + dims[:, None]
            at_v = head // GROUP * v_head + cols[:, None] * v_row + dims[None, :]
            k = tl.load(k_ptr + at_k, mask=cols[None, :] < seq_k, other=0.0)
            v = tl.load(v_ptr + at_v, mask=cols[:, None] < seq_k, other=0.0)
            s = tl.dot(q, k) * (scale * 1.4426950408889634)
            if part == 1:
                s = tl.where(cols[None, :] <= rows[:, None] + seq_k - seq_q, s, float("-inf"))
            m_new = tl.maximum(m, tl.max(s, axis=1))
            p = tl.exp2(s - m_new[:, None])
            l = l * tl.exp2(m - m_new) + tl.sum(p, axis=1)  # noqa: E741
            acc = acc * tl.exp2(m - m_new)[:, None] + tl.dot(p.to(v.dtype), v)
            m = m_new
    at_o = head * o_head + rows[:, None] * o_row + dims[None, :]
    tl.store(o_ptr + at_o, (acc / l[:, None]).to(o_ptr.dtype.element_ty), mask=rows[:, None] < seq_q)


def flash_grouped(q, k, v, scale, block_m=128, block_n=32):
    o = torch.empty_like(q)
    strides = [n for x in (q, k, v, o) for n in x.stride()[:2]]
    in_two_loops[(triton.cdiv(len(q), block_m), q.shape[1])](
        q, k, v, o, scale, len(q), len(k), *strides,
        GROUP=q.shape[1] // k.shape[1], BLOCK_M=block_m, BLOCK_N=block_n, HEAD_DIM=q.shape[2],
    )  # fmt: skip
    return o


def test_grouped_attention_may_have_a_loop_for_the_diagonal_other_tiles_and_base_2():
    accepted("flash_grouped", flash_grouped)
