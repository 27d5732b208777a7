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


def twice(x: torch.Tensor) -> torch.Tensor:
    return x + x


def doubled_for_show(x: torch.Tensor) -> torch.Tensor:
    return doubled(x).mean() * len(x)


@triton.jit
def careless_kernel(x_ptr, y_ptr, n, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(y_ptr + at, 2 * tl.load(x_ptr + at))


def careless(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    careless_kernel[(triton.cdiv(len(x), 16),)](x, y, len(x), BLOCK=16)
    return y


@triton.jit
def grow_kernel(x_ptr):
    at = tl.arange(0, 4)
    tl.store(x_ptr + at, tl.load(x_ptr + at) + 1)


def grown(x: torch.Tensor) -> torch.Tensor:
    grow_kernel[(1,)](x)
    return x


def test_an_answer_that_launches_its_kernel_passes_and_an_empty_result_needs_none():
    x = torch.arange(5.0, device=device.name())
    assert run_kernel(doubled, x).tolist() == [0.0, 2.0, 4.0, 6.0, 8.0]
    assert run_kernel(doubled, x[:0]).tolist() == []


def test_the_right_values_without_a_launch_are_refused():
    with pytest.raises(Failed, match="no Triton kernel was launched"):
        run_launching(twice, torch.ones(3))


def test_a_kernel_launched_for_show_does_not_let_torch_do_the_sum():
    with pytest.raises(Failed, match="`mean` does work that the kernel is to do"):
        run_kernel(doubled_for_show, torch.ones(3, device=device.name()))


def test_an_access_outside_is_seen_though_the_memory_there_can_be_written_and_is_left_alone():
    x, y = torch.ones(32, device=device.name()), torch.zeros(32, device=device.name())
    with pytest.raises(Failed, match="an access outside its tensor"):
        run_launching(careless, x[:20], y[:20])
    assert not y.any(), "an answer that leaves its tensors was carried out all the same"
    assert run_launching(careless, x[:16], y[:16]).tolist() == [2.0] * 16


def test_the_count_before_the_run_leaves_the_arguments_as_they_were():
    x = torch.arange(4.0, device=device.name())
    assert run_launching(grown, x).tolist() == [1.0, 2.0, 3.0, 4.0]
