"""What the checks of lab 2 say to right answers in another style, which no mutant can be."""

import torch

import labkit
from labkit import device

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
