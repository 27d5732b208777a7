"""What one program touches, element by element, equals what its index arithmetic says."""

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from labkit.access_map import map_accesses
from labkit.meter import Call


@triton.jit
def tile_kernel(x_ptr, out_ptr, sums_ptr, rows, columns, stride_x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    m = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    live = (m < rows)[:, None] & (n < columns)[None, :]
    x = tl.load(x_ptr + m[:, None] * stride_x + n[None, :], mask=live, other=0.0)
    again = tl.load(x_ptr + m * stride_x, mask=m < rows, other=0.0)
    tl.store(out_ptr + m[:, None] * columns + n[None, :], x + again[:, None], mask=live)
    tl.atomic_add(sums_ptr + m, tl.sum(x, 1), mask=m < rows)


def tiles(x, out, sums):
    grid = (triton.cdiv(x.shape[0], 4), triton.cdiv(x.shape[1], 8))
    tile_kernel[grid](x, out, sums, *x.shape, x.stride(0), BLOCK_M=4, BLOCK_N=8)
    return out


def call():
    return Call(tiles, (torch.randn(6, 20)[:, :12], torch.zeros(6, 12), torch.zeros(6)))


def test_a_program_of_a_strided_view_touches_its_tile_and_nothing_else():
    access = map_accesses(call(), program=(1, 1))
    x = np.zeros((6, 12), int)
    x[4:6, 8:12] = 1
    assert np.array_equal(access.stored["out_ptr"], x)
    x[4:6, 0] += 1
    assert np.array_equal(access.loaded["x_ptr"], x), "the first column is loaded once more for each row"
    assert access.loaded["x_ptr"].shape == (6, 12)
    assert (access.kernel, access.grid, access.program) == ("tile_kernel", (2, 2, 1), (1, 1, 0))
    assert access.outside == ()


def test_an_atomic_loads_and_stores():
    access = map_accesses(call(), program=0)
    assert access.loaded["sums_ptr"].tolist() == access.stored["sums_ptr"].tolist() == [1, 1, 1, 1, 0, 0]
    assert access.arguments == ("x_ptr", "sums_ptr", "out_ptr")


def test_all_programs_together_store_each_element_once():
    total = sum(map_accesses(call(), program=(i, j)).stored["out_ptr"] for i in range(2) for j in range(2))
    assert (total == 1).all()


def test_the_map_says_itself_in_words():
    words = str(map_accesses(call(), program=0))
    assert "tile_kernel, program (0, 0, 0) of grid (2, 2, 1)" in words
    assert "x_ptr: 32 loaded of 72 elements, 2 times at most" in words
    assert "sums_ptr: 4 loaded and 4 stored of 6 elements" in words


def twice(x, out, sums):
    tiles(x, out, sums)
    tiles(x[:2], out[:2], sums[:2])


def test_a_later_launch_can_be_followed():
    access = map_accesses(Call(twice, call().args), program=0, launch=1)
    assert access.stored["out_ptr"].shape == (2, 12) and access.stored["out_ptr"].sum() == 16


@triton.jit
def overrun_kernel(x_ptr, out_ptr, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out_ptr + at, tl.load(x_ptr + at))


def overrun(x, out):
    overrun_kernel[(triton.cdiv(x.numel(), 8),)](x, out, BLOCK=8)


def test_lanes_outside_their_tensor_are_named_and_not_drawn():
    access = map_accesses(Call(overrun, (torch.zeros(10), torch.zeros(16))), program=1)
    assert access.loaded["x_ptr"].tolist() == [0] * 8 + [1] * 2
    (outside,) = access.outside
    assert (outside.argument, outside.lanes) == ("x_ptr", 6)
    assert "OUTSIDE" in str(access)
    assert map_accesses(Call(overrun, (torch.zeros(10), torch.zeros(16))), program=0).outside == ()


def test_a_program_or_a_launch_that_is_not_there_is_named():
    with pytest.raises(ValueError, match=r"program: \(9, 0, 0\) is not in the grid \(2, 2, 1\) of tile_kernel"):
        map_accesses(call(), program=9)
    with pytest.raises(ValueError, match=r"no launch 1 of kernel tile_kernel; launches by kernel: tile_kernel \(1\)"):
        map_accesses(call(), kernel="tile_kernel", launch=1)
    with pytest.raises(ValueError, match=r"no launch 0 of kernel other; launches by kernel: tile_kernel \(1\)"):
        map_accesses(call(), kernel="other")
    for bad in (-1, (0, 0, 0, 0), ()):
        with pytest.raises(ValueError, match="program: expected one to three indices"):
            map_accesses(call(), program=bad)
