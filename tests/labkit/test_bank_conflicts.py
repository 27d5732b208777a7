"""Bank conflicts equal those that one counts by hand, and a layout that ends the compiler ends nothing here."""

import time

import pytest
from triton.experimental.gluon import language as gl

from labkit.bank_conflicts import NoCount, count_by_address, count_conflicts

ROWS = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])  # a warp reads 4 rows, 16 bytes a lane
DOWN = gl.BlockedLayout([1, 8], [32, 1], [2, 2], [1, 0])  # a lane a row, 16 bytes each, as a dot operand is read
TRANSPOSED = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])  # a lane a row, one element each


def swizzled(vec, max_phase):
    return gl.SwizzledSharedLayout(vec=vec, per_phase=1, max_phase=max_phase, order=[1, 0])


@pytest.mark.parametrize(
    "vec, max_phase, conflicts",
    [(1, 1, (0, 7, 31)), (8, 8, (0, 0, 3)), (1, 32, (0, 0, 0)), (2, 32, (0, 0, 0))],
)
def test_a_swizzle_decides_what_each_way_of_reading_costs(vec, max_phase, conflicts):
    found = tuple(count_conflicts(read, swizzled(vec, max_phase), (64, 64)) for read in (ROWS, DOWN, TRANSPOSED))
    assert found == conflicts


@pytest.mark.parametrize("vec, max_phase", [(1, 1), (8, 8), (2, 32), (4, 16), (8, 4), (2, 8)])
def test_the_compilers_count_is_the_count_by_address(vec, max_phase):
    for read in (ROWS, DOWN, TRANSPOSED):
        counted = count_conflicts(read, swizzled(vec, max_phase), (64, 64))
        assert count_by_address(read, swizzled(vec, max_phase), (64, 64)) == counted, read


@pytest.mark.parametrize("vec, max_phase, conflicts", [(1, 1, 31), (4, 8, 3), (1, 32, 0)])
def test_of_whole_words_both_counts_are_the_same(vec, max_phase, conflicts):
    for count in (count_conflicts, count_by_address):
        assert count(TRANSPOSED, swizzled(vec, max_phase), (32, 32), "float32") == conflicts


def test_the_compiler_overlooks_two_halves_of_different_words_in_one_bank():
    # Lane i reads the half at 64 * i + (0 ^ i): lanes 2k and 2k + 1 read bank k, in different rows.
    words = [(128 * i + 2 * i) // 4 for i in range(32)]
    assert len({w % 32 for w in words}) == 16 and len(set(words)) == 32
    assert count_by_address(TRANSPOSED, swizzled(1, 32), (64, 64)) == 1
    assert count_conflicts(TRANSPOSED, swizzled(1, 32), (64, 64)) == 0, (
        "the compiler has learned it: say so in the docstring"
    )


def test_what_the_compiler_chose_for_tensor_cores_has_no_conflict_when_read_by_rows():
    assert count_conflicts(ROWS, gl.NVMMASharedLayout(128, 16, 2), (64, 64), "bfloat16") == 0


def test_a_layout_that_aborts_the_compiler_is_an_error_and_the_next_count_works():
    padded = gl.PaddedSharedLayout.with_identity_for([[64, 8]], [64, 64], [1, 0])
    with pytest.raises(NoCount, match=r"PaddedSharedLayout: the process died \(SIGABRT\).*unknown layout"):
        count_conflicts(ROWS, padded, (64, 64))
    began = time.perf_counter()
    assert count_conflicts(ROWS, swizzled(8, 8), (64, 64)) == 0
    assert time.perf_counter() - began < 2, "the process should have been kept"


def test_wrong_arguments_are_named():
    with pytest.raises(TypeError, match="registers: expected a Gluon layout, got list"):
        count_conflicts([1, 8], swizzled(1, 1), (64, 64))
    with pytest.raises(TypeError, match="shared: expected a Gluon layout, got NoneType"):
        count_conflicts(ROWS, None, (64, 64))
    with pytest.raises(ValueError, match=r"shape: powers of two, not \[64, 48\]"):
        count_conflicts(ROWS, swizzled(1, 1), (64, 48))
    with pytest.raises(
        ValueError, match="shared: a SwizzledSharedLayout of two dimensions, not NVMMASharedLayout of 2"
    ):
        count_by_address(ROWS, gl.NVMMASharedLayout(128, 16, 2), (64, 64))
    with pytest.raises(ValueError, match="dtype: 'half' is not one of"):
        count_conflicts(ROWS, swizzled(1, 1), (64, 64), "half")
