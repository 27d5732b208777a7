"""Matrix products with few rows, against float64."""

import pytest
import torch

from kernels import reference
from kernels.skinny_matmul import SHARED, Plan, faster_than_cublas, plan_for, skinny_matmul
from labkit.checks import compare


def make(device, dtype, rows, n, k):
    x = torch.randn(rows, k, device=device).to(dtype)
    return x, (torch.randn(n, k, device=device) * k**-0.5).to(dtype)


def added_in_order(x, w):
    """x @ w.T in float32, one product after another as the kernel adds them. A library's product sums in a tree, whose
    error grows with log(k) and not with sqrt(k): no measure for this one."""
    total = torch.zeros(len(x), len(w), device=x.device)
    for column in range(x.shape[1]):
        total += x[:, column, None].float() * w[:, column].float()
    return total


def check(x, w, **options):
    y = skinny_matmul(x, w, **options)
    exact, peer = x.double() @ w.double().T, added_in_order(x, w)
    if options.get("gated"):
        exact, peer = reference.silu_mul(exact), reference.silu_mul(peer, dtype=torch.float32)
    if y.ndim == 3:
        assert y.dtype == torch.float32 and len(y) == options["plan"].parts
        y = y.sum(0).to(x.dtype)
    compare.close(y, exact, peer.to(x.dtype), "y")


@pytest.mark.parametrize("rows", [1, 3, 16, 17, 64, 128])
def test_few_rows(device, dtype, rows):
    check(*make(device, dtype, rows, 96, 128), whole=True)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("n, k", [(64, 256), (50, 72), (33, 1), (130, 40)])
def test_sizes_that_fill_no_tile(device, dtype, gated, n, k):
    check(*make(device, dtype, 5, n * (1 + gated), k), gated=gated, whole=True)


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize("k", [256, 250])
def test_parts_add_up_even_when_the_last_ones_are_empty(device, dtype, parts, k):
    check(*make(device, dtype, 4, 40, k), plan=Plan(32, 128, parts))


def test_strided_rows_pass_as_views(device, dtype):
    x, w = make(device, dtype, 4, 32, 128)
    check(x[::2, :64], w[:, :64], whole=True)


@pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])
@pytest.mark.parametrize("rows", [1, 17, 33, 100, 128])
@pytest.mark.parametrize("n, k", [(6144, 4096), (4096, 12288), (1024, 2048), (12288, 4096), (151936, 1024), (40, 64)])
def test_a_plan_of_any_shape_fits_the_shared_memory_and_covers_k(rows, n, k, gated):
    plan = plan_for(rows, n, k, 2, gated=gated)
    columns = max(16, 1 << (rows - 1).bit_length())
    assert 2 * plan.block_k * (plan.block_n * (1 + gated) + columns) * plan.num_stages <= SHARED
    assert plan.parts == 1 or (not gated and k // plan.parts >= 256)


@pytest.mark.parametrize(
    "rows, n, k, gated, ours",
    [
        (1, 6144, 4096, False, True), (16, 1024, 2048, False, True), (64, 6144, 4096, False, False),
        (64, 4096, 12288, False, False), (64, 12288, 4096, True, True), (64, 3072, 1024, True, False),
        (64, 151936, 4096, False, True), (64, 1024, 3072, False, True), (128, 1024, 3072, False, False),
    ],
)  # fmt: skip
def test_cublas_runs_where_it_was_measured_to_be_faster(rows, n, k, gated, ours):
    assert faster_than_cublas(rows, n, k, gated=gated) == ours


def test_the_plan_splits_k_where_outputs_are_few_and_never_where_it_must_not():
    assert plan_for(1, 4096, 4096, 2).parts > 1 and plan_for(1, 151936, 4096, 2).parts == 1
    assert plan_for(1, 4096, 4096, 2, whole=True).parts == plan_for(1, 512, 4096, 2, gated=True).parts == 1


@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"x": lambda x, w: (x[0], w)}, ValueError, "x: expected"),
        ({"x": lambda x, w: (x.repeat(40, 1), w)}, ValueError, "at most 128 rows"),
        ({"w": lambda x, w: (x, w.float())}, TypeError, "w: expected torch.float16 like x"),
        ({"w": lambda x, w: (x, w[:, :8])}, ValueError, r"w: expected \[n, 64\]"),
        ({"w": lambda x, w: (x, w[:7])}, ValueError, "as many gate as up rows"),
        ({"plan": lambda x, w: (x, w)}, ValueError, "plan: 2 parts"),
    ],
)
def test_bad_input_names_the_argument(device, change, error, message):
    ((name, alter),) = change.items()
    x, w = alter(*make(device, torch.float16, 4, 8, 64))
    with pytest.raises(error, match=message):
        skinny_matmul(x, w, gated=True, plan=Plan(16, 32, 2) if name == "plan" else None)


def test_no_row_gives_no_row(device):
    x, w = make(device, torch.float16, 0, 8, 64)
    assert skinny_matmul(x, w).shape == (0, 8)
