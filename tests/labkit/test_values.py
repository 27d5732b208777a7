"""labkit.checks.values: an answer to a kernel question launches a kernel, and leaves the work to it."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from labkit import device
from labkit.checks.contract import Failed
from labkit.checks.values import run_kernel, run_launching


@triton.jit
def double_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at, mask=at < n, other=0.0), mask=at < n)


def doubled(x: torch.Tensor) -> torch.Tensor:
    y = torch.empty_like(x)
    if len(x):
        double_kernel[(1,)](x, y, len(x), BLOCK=16)
    return y


def test_an_answer_that_launches_its_kernel_passes_and_an_empty_result_needs_none():
    x = torch.arange(5.0, device=device.name())
    assert run_kernel(doubled, x).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert run_kernel(doubled, x[:0]).tolist() == []


def test_the_right_values_without_a_launch_are_refused():
    with pytest.raises(Failed, match="no Triton kernel was launched"):
        run_launching(lambda x: x + x, torch.ones(3))


def test_a_kernel_launched_for_show_does_not_let_torch_do_the_sum():
    with pytest.raises(Failed, match="`mean` does work that the kernel is to do"):
        run_kernel(lambda x: doubled(x).mean() * len(x), torch.ones(3, device=device.name()))
