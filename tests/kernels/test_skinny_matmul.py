"""Matrix products with few rows, against float64."""

import pytest
import torch

from kernels import reference
from kernels.skinny_matmul import Plan, plan_for, skinny_matmul
from labkit.checks import compare


def make(device, dtype, rows, n, k):
    x = torch.randn(rows, k, device=device).to(dtype)
    return x, (torch.randn(n, k, device=device) * k**-0.5).to(dtype)


def check(x, w, **options):
    y = skinny_matmul(x, w, **options)
    exact, peer = x.double() @ w.double().T, x.float() @ w.float().T
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
