"""The meter's counts equal the counts by hand, and an access outside its tensor is named."""

import torch
import triton
import triton.language as tl
from metered import copy, counting_up, matmul, softmax, softmax_twice

from labkit.meter import Call, measure, measure_many


def test_a_copy_loads_and_stores_each_element_once_and_its_masked_tail_not_at_all():
    x, out = torch.randn(100), torch.zeros(100)
    count = measure(copy, x, out)
    assert (count.bytes_loaded, count.bytes_stored, count.bytes) == (400, 400, 800)
    assert (count.loads, count.stores, count.launches, count.programs) == (4, 4, 1, 4)
    assert (count.dots, count.atomics, count.outside) == (0, 0, ())
    assert count.kernels["copy_kernel"].loaded == {"x_ptr": 400}
    assert count.kernels["copy_kernel"].stored == {"out_ptr": 400}


def test_a_tensor_of_one_element_is_counted_and_none_of_no_element_is_touched():
    x = torch.randn(1)
    count = measure(copy, x, torch.empty(1))
    assert (count.bytes_loaded, count.bytes_stored, count.outside) == (4, 4, ())
    assert measure(copy, torch.empty(0), torch.empty(0)).bytes == 0


def test_what_the_call_wrote_in_place_and_what_it_returned_come_back():
    x, out = torch.randn(100), torch.zeros(100)
    count = measure(copy, x, out)
    assert torch.equal(out, x), "the caller's own tensor must hold the output"
    assert torch.equal(count.result, x)


def test_a_row_softmax_counts_each_row_once_however_wide_its_block():
    x = torch.randn(5, 37)
    count = measure(softmax, x)
    assert (count.bytes_loaded, count.bytes_stored) == (5 * 37 * 4, 5 * 37 * 4)
    assert (count.loads, count.stores, count.programs) == (5, 5, 5)
    torch.testing.assert_close(count.result, x.softmax(-1))


def test_a_matmul_counts_its_tiles_and_the_flops_of_padded_dots():
    m, n, k = 40, 50, 36  # 3 x 2 programs, 3 steps of K, tails everywhere
    a, b = torch.randn(m, k), torch.randn(k, n)
    count = measure(matmul, a, b)
    tally = count.kernels["matmul_kernel"]
    assert tally.loaded == {"a_ptr": m * k * 2 * 4, "b_ptr": k * n * 3 * 4}, "A once a column tile, B once a row tile"
    assert tally.stored == {"c_ptr": m * n * 4}
    assert (count.loads, count.dots, count.programs) == (6 * 3 * 2, 6 * 3, 6)
    assert count.dot_flops == 6 * 3 * 2 * 16 * 32 * 16
    torch.testing.assert_close(count.result, a @ b)


@triton.jit
def descriptor_kernel(x_ptr, out_ptr, rows, columns, BM: tl.constexpr, BN: tl.constexpr):
    source = tl.make_tensor_descriptor(x_ptr, shape=[rows, columns], strides=[columns, 1], block_shape=[BM, BN])
    target = tl.make_tensor_descriptor(out_ptr, shape=[rows, columns], strides=[columns, 1], block_shape=[BM, BN])
    at = [tl.program_id(0) * BM, 0]
    target.store(at, source.load(at) * 2)


def doubled(x):
    out = torch.empty_like(x)
    descriptor_kernel[(triton.cdiv(x.shape[0], 8),)](x, out, *x.shape, BM=8, BN=32)
    return out


def test_descriptors_count_what_lies_inside_their_shape():
    x = torch.randn(10, 24)
    count = measure(doubled, x)
    assert (count.bytes_loaded, count.bytes_stored) == (960, 960)
    assert count.kernels["descriptor_kernel"].loaded == {"x_ptr": 960}
    assert torch.equal(count.result, x * 2)


@triton.jit
def block_pointer_kernel(x_ptr, out_ptr, n, BLOCK_SIZE: tl.constexpr):
    at = tl.program_id(0) * BLOCK_SIZE
    source = tl.make_block_ptr(x_ptr, (n,), (1,), (at,), (BLOCK_SIZE,), (0,))
    target = tl.make_block_ptr(out_ptr, (n,), (1,), (at,), (BLOCK_SIZE,), (0,))
    tl.store(target, tl.load(source, boundary_check=(0,)), boundary_check=(0,))


def block_copy(x):
    out = torch.empty_like(x)
    block_pointer_kernel[(triton.cdiv(x.numel(), 16),)](x, out, x.numel(), BLOCK_SIZE=16)
    return out


def test_block_pointers_are_counted_and_bounded():
    x = torch.randn(20)
    count = measure(block_copy, x)
    assert (count.bytes_loaded, count.bytes_stored, count.outside) == (80, 80, ())
    assert torch.equal(count.result, x)


@triton.jit
def histogram_kernel(x_ptr, bins_ptr, n, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    inside = offsets < n
    tl.atomic_add(bins_ptr + tl.load(x_ptr + offsets, mask=inside, other=0), 1, mask=inside)


def histogram(x):
    bins = torch.zeros(4, dtype=torch.int32)
    histogram_kernel[(triton.cdiv(x.numel(), 16),)](x, bins, x.numel(), BLOCK_SIZE=16)
    return bins


def test_an_atomic_counts_as_a_load_and_a_store():
    x = torch.randint(0, 4, (20,))
    count = measure(histogram, x)
    assert count.atomics == 2
    assert (count.bytes_loaded, count.bytes_stored) == (20 * 8 + 20 * 4, 20 * 4)
    assert torch.equal(count.result.long(), torch.bincount(x, minlength=4))


@triton.jit
def unmasked_kernel(x_ptr, out_ptr, shift, BLOCK_SIZE: tl.constexpr):
    offsets = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    tl.store(out_ptr + offsets, tl.load(x_ptr + offsets + shift))


def unmasked_copy(x, out, shift=0):
    unmasked_kernel[(triton.cdiv(x.numel(), 16),)](x, out, shift, BLOCK_SIZE=16)


def test_an_access_past_the_end_is_named_with_kernel_argument_offset_and_program():
    memory = torch.zeros(64)
    count = measure(unmasked_copy, memory[:20], torch.zeros(64))
    (access,) = count.outside
    assert (access.op, access.kernel, access.argument) == ("load", "unmasked_kernel", "x_ptr")
    assert (access.offset, access.elements, access.lanes, access.program) == (20, 20, 12, (1, 0, 0))
    assert str(access) == (
        "unmasked_kernel: 12 lanes of a load in program (1, 0, 0) left `x_ptr`: the first at element 20, and it has 20"
    )
    assert "OUTSIDE" in str(count)


def test_an_access_before_the_start_has_a_negative_offset():
    count = measure(unmasked_copy, torch.zeros(16), torch.zeros(16), shift=-3)
    assert [(a.op, a.offset, a.lanes) for a in count.outside] == [("load", -3, 3)]


def test_a_store_outside_its_tensor_writes_nothing_not_even_into_a_neighbour():
    memory = torch.zeros(64)
    count = measure(unmasked_copy, torch.ones(20), memory[:10])
    assert {(a.op, a.argument) for a in count.outside} == {("load", "x_ptr"), ("store", "out_ptr")}
    assert memory[:10].eq(1).all()
    assert memory[10:].eq(0).all(), "the store went on into memory that the argument does not own"


def test_a_strided_view_owns_its_elements_and_not_the_gaps_between_them():
    whole = torch.randn(8, 6)
    count = measure(unmasked_copy, whole[:, :2], torch.zeros(16))
    (access,) = count.outside
    assert access.offset == 2
    assert "fell into a gap between the elements of `x_ptr`" in str(access)
    assert measure(unmasked_copy, whole.t().contiguous().t()[:, 0], torch.zeros(16)).outside[0].offset == 8


@triton.jit
def wild_kernel(out_ptr):
    tl.store((tl.full((), 4096, tl.int64)).to(tl.pointer_type(tl.float32)), 1.0)


def wild_store(out):
    wild_kernel[(1,)](out)


def test_a_pointer_that_comes_from_no_tensor_is_reported_and_not_followed():
    (access,) = measure(wild_store, torch.zeros(4)).outside
    assert "derived from no tensor" in str(access)


def test_a_shuffled_order_shows_that_programs_depend_on_one_another():
    in_order, shuffled = torch.zeros(16), torch.zeros(16)
    measure(counting_up, in_order)
    count = measure_many([Call(counting_up, (shuffled,))], shuffle=1)[0]
    assert torch.equal(in_order, torch.arange(16.0))
    assert not torch.equal(shuffled, in_order), "the order was not changed"
    assert count.programs == 16


def test_a_shuffled_order_runs_each_program_of_a_grid_once():
    a, b = torch.randn(40, 36), torch.randn(36, 50)
    count = measure_many([Call(matmul, (a, b))], shuffle=3)[0]
    torch.testing.assert_close(count.result, a @ b)
    assert count.kernels["matmul_kernel"].loaded == measure(matmul, a, b).kernels["matmul_kernel"].loaded


def test_exponentials_are_counted_by_element_masked_lanes_included():
    count = measure(softmax, torch.randn(5, 37))
    assert count.exponentials == 5 * 64, "a row of 37 is computed in a block of 64"
    assert measure(copy, torch.zeros(8), torch.zeros(8)).exponentials == 0


def test_the_largest_tile_is_a_shape_and_the_peak_counts_what_lives_at_once():
    a, b = torch.randn(16, 16), torch.randn(16, 32)
    count = measure(matmul, a, b)
    assert count.largest_tile == (16, 32)
    tiles_of_the_loop = (16 * 16 + 16 * 32 + 16 * 32) * 4  # a, b and acc
    assert tiles_of_the_loop <= count.peak_live_bytes <= tiles_of_the_loop + 2 * 16 * 32 * 4, (
        "and temporaries of the dot"
    )
    wide = measure(softmax, torch.randn(2, 1000))
    assert wide.largest_tile == (1024,)
    assert 2 * 4096 <= wide.peak_live_bytes <= 6 * 4096


@triton.jit
def chain_kernel(x_ptr, out_ptr, steps, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    for _ in range(steps):
        x = x + 1.0
    tl.store(out_ptr + at, x)


def chained(x, out, steps):
    chain_kernel[(1,)](x, out, steps, BLOCK=64)


def test_a_tile_that_no_name_holds_any_more_is_not_alive():
    few, many = (measure(chained, torch.zeros(64), torch.zeros(64), steps).peak_live_bytes for steps in (2, 50))
    assert few == many > 0


@triton.jit
def unsafe_sum_kernel(x_ptr, out_ptr):
    x = tl.load(x_ptr + tl.program_id(0))
    tl.store(out_ptr, tl.load(out_ptr) + x)


@triton.jit
def atomic_sum_kernel(x_ptr, out_ptr):
    tl.atomic_add(out_ptr, tl.load(x_ptr + tl.program_id(0)))


def unsafe_sum(x, out):
    unsafe_sum_kernel[(x.numel(),)](x, out)


def atomic_sum(x, out):
    atomic_sum_kernel[(x.numel(),)](x, out)


def test_a_sum_without_atomics_is_right_in_every_order_and_found_all_the_same():
    out = torch.zeros(1)
    (count,) = measure_many([Call(unsafe_sum, (torch.ones(8), out))], shuffle=2, conflicts=True)
    assert out.item() == 8, "one program after another, it is right: that is why it must be found another way"
    assert {(c.argument, c.first, c.second) for c in count.conflicts} >= {("out_ptr", "store", "load")}
    assert "unsafe_sum_kernel: program" in str(count.conflicts[0])
    (fixed,) = measure_many([Call(atomic_sum, (torch.ones(8), torch.zeros(1)))], conflicts=True)
    assert fixed.conflicts == ()


def test_programs_that_keep_to_their_own_elements_do_not_conflict_nor_do_launches_after_one_another():
    x = torch.randn(40, 36)
    (count,) = measure_many([Call(softmax_twice, (x,))], conflicts=True)
    assert count.conflicts == ()
    (count,) = measure_many([Call(matmul, (x, torch.randn(36, 50)))], conflicts=True)
    assert count.conflicts == (), "loading what others load is no conflict"


def test_a_program_that_reads_what_its_neighbour_writes_is_found():
    (count,) = measure_many([Call(counting_up, (torch.zeros(4),))], conflicts=True)
    first = count.conflicts[0]
    assert (first.element, first.programs, first.first, first.second) == (1, ((1, 0, 0), (2, 0, 0)), "store", "load")
