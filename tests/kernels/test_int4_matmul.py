import pytest
import torch

from kernels import int4_hopper, int4_matmul, reference
from kernels.int4_matmul import Plan, dequantized
from kernels.int4_parts import Workspace, share_out
from kernels.int4_repack import repack_awq, unpack_awq
from labkit.checks import compare

DTYPES = (torch.float16, torch.bfloat16) if torch.cuda.is_available() else (torch.float16,)
HOPPER = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
on_hopper = pytest.mark.skipif(not HOPPER, reason="the Gluon kernel needs an sm_90 GPU")


def checkpoint(k, n, group_size, device, seed=0):
    """qweight, qzeros and scales of an AutoAWQ checkpoint: every code and zero point from 0 to 15."""
    random = torch.Generator().manual_seed(seed)
    groups = 1 if group_size == -1 else k // group_size

    def words(rows):
        return torch.randint(-(2**31), 2**31, (rows, n // 8), dtype=torch.int32, generator=random).to(device)

    return words(k), words(groups), (torch.rand(groups, n, generator=random) * 0.02 + 0.002).half().to(device)


def make(m, k, n, group_size, device, dtype=torch.float16):
    """x, the weights packed, and the same dequantized by the reference."""
    qweight, qzeros, scales = checkpoint(k, n, group_size, device)
    x = torch.randn(m, k, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    packed = repack_awq(qweight, qzeros, scales, group_size=group_size, dtype=dtype)
    return x, packed, reference.dequantize_awq(qweight, qzeros, scales, group_size, dtype)


def check(x, packed, weights, call=None, **options):
    """The product against one in float64; the output is poisoned before."""
    out = compare.poison(torch.empty(*x.shape[:-1], packed.out_features, dtype=x.dtype, device=x.device))
    if call is None:
        assert int4_matmul.int4_matmul(x, packed, out=out, **options) is out
    else:
        call(x, packed, out)
    exact = reference.int4_matmul(x, weights)
    compare.close(out, exact, reference.int4_matmul(x.float(), weights, torch.float32).to(x.dtype), "out")
    return out


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_are_dequantized_to_the_references_bits_in_every_group_size(group_size, dtype, device):
    k = 256 if group_size > 0 else 200
    _, packed, weights = make(1, k, 72, group_size, device, dtype)
    compare.equal(dequantized(packed), weights, "the dequantized weights")


@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_scales_and_zeros_change_exactly_at_the_borders_of_groups(group_size, device):
    k = 256
    x, packed, weights = make(k, k, 16, group_size, device)
    x = torch.eye(k, dtype=x.dtype, device=device)  # each row asks for one column of the weights
    out = int4_matmul.int4_matmul(x, packed, variant="tl")
    compare.equal(out.T.contiguous(), weights, "the product with the identity")


@pytest.mark.parametrize("m", [1, 16, 17, 130])
def test_any_number_of_rows(m, device):
    check(*make(m, 128, 64, 128, device), variant="tl")


@pytest.mark.parametrize("k, n, group_size", [(96, 72, 32), (192, 136, 64), (40, 24, -1)])
def test_tails_in_both_features(k, n, group_size, device):
    check(*make(3, k, n, group_size, device), variant="tl")


def test_a_tile_that_is_parted_is_summed_up_and_the_counters_are_set_back(device):
    x, packed, weights = make(2, 1024, 64, 128, device)
    workspace = Workspace.allocate(device, 1 << 20, 1024)
    workspace.parts.fill_(float("nan"))
    plan = Plan(block_n=64, block_m=16, num_warps=4, num_stages=2, ctas_per_sm=2)
    places = 2 * (torch.cuda.get_device_properties(0).multi_processor_count if device == "cuda" else 2)
    assert share_out(1, 16, places, 0)[0] > 1, "the launch under test parts no tile"
    check(x, packed, weights, lambda x, w, y: int4_matmul._launch(x, w, y, workspace, False, plan))
    assert workspace.parts.isfinite().any(), "no partial sum was stored: the tile was not parted"
    assert not workspace.arrivals.any(), "an arrival counter was not set back to zero"


def test_the_variant_that_dequantizes_first_has_the_same_product(device):
    check(*make(9, 128, 72, 64, device), variant="dequantize")


def test_leading_dimensions_and_no_rows_pass_and_strided_rows_too(device):
    x, packed, weights = make(6, 128, 64, 128, device)
    check(x.view(2, 3, 128), packed, weights)
    assert int4_matmul.int4_matmul(x[:0], packed).shape == (0, 64)
    wide = torch.cat([x, x], 1)
    check(wide[:, :128], packed, weights)


@pytest.mark.parametrize("tiles", [1, 7, 64, 224, 1000])
@pytest.mark.parametrize("steps", [1, 16, 56])
def test_all_work_is_shared_out_once_and_no_program_has_two_units_more(tiles, steps):
    programs, unit = share_out(tiles, steps, 132, 4)
    assert steps % unit == 0, "a unit crosses the end of a tile"
    assert 1 <= programs <= 132
    longest = -(-tiles * steps // unit // programs) * unit
    assert longest <= max(steps, -(-tiles * steps // 132) + steps), "a program has far more than its share"


@pytest.mark.parametrize("m", [1, 8, 16, 32, 64, 100, 128, 256, 512, 1024, 5000])
@pytest.mark.parametrize("n, k", [(4096, 4096), (8192, 8192), (28672, 8192), (8192, 28672), (24, 40), (11008, 4096)])
def test_a_plan_of_the_hopper_kernel_fits_an_sm(m, n, k):
    plan = int4_hopper.plan_for(m, n, k)
    assert plan.block_m >= min(m, 64)
    block = 64 * plan.parts * 32 + 2 * 32 * plan.parts * 4 + plan.block_m * 128  # weights, one group's scales, x
    shared = plan.stages * plan.blocks * block
    assert shared * plan.ctas_per_sm < 227 * 1024, f"{plan} asks for {shared} bytes of shared memory"
    assert plan.computing_registers <= 255


WRONG = {
    "group_size": (lambda q, z, s: repack_awq(q, z, s, group_size=48), ValueError, "group_size: expected 32, 64, 128"),
    "in_features": (lambda q, z, s: repack_awq(q[:96], z, s, group_size=64), ValueError, "must be a multiple of group"),
    "qzeros": (lambda q, z, s: repack_awq(q, z[:1], s, group_size=64), ValueError, "qzeros: expected"),
    "scales": (lambda q, z, s: repack_awq(q, z, s.T, group_size=64), ValueError, "scales: expected"),
    "dtype": (lambda q, z, s: repack_awq(q, z, s, group_size=64, dtype=torch.float32), TypeError, "dtype: expected"),
}


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_checkpoint_is_refused_by_name(what, device):
    call, error, message = WRONG[what]
    with pytest.raises(error, match=message):
        call(*checkpoint(128, 64, 64, device))


def test_a_wrong_argument_of_the_product_is_refused_by_name(device):
    x, packed, _ = make(2, 128, 64, 64, device)
    for bad, error, message in [
        ({"x": x[:, :64]}, ValueError, "x: expected"),
        ({"x": x.float()}, TypeError, "x: expected"),
        ({"variant": "fast"}, ValueError, "variant: expected one of"),
        ({"weight": packed.words}, TypeError, "weight: expected an Int4Weight"),
        ({"out": x}, ValueError, "out: expected"),
    ]:
        with pytest.raises(error, match=message):
            int4_matmul.int4_matmul(**{"x": x, "weight": packed} | bad)
    with pytest.raises(ValueError, match="workspace: expected"):
        small = Workspace.allocate(device, 1, 1)
        int4_matmul.int4_matmul(x, packed, workspace=small, variant="tl")


def test_unpacking_gives_the_columns_in_order():
    word = sum(column << 4 * nibble for nibble, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    assert unpack_awq(torch.tensor([[word]], dtype=torch.int64).int()).tolist() == [list(range(8))]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the interpreter runs no inline assembly")
@pytest.mark.parametrize("dtype", DTYPES)
def test_inline_assembly_has_the_bits_of_its_plain_twin(dtype, device):
    x, packed, weights = make(5, 256, 72, 32, device, dtype)
    compare.equal(dequantized(packed, asm=True), dequantized(packed, asm=False), "the weights")
    fast, plain = (
        check(x, packed, weights, lambda x, w, y, asm=asm: int4_matmul._launch(x, w, y, None, asm))
        for asm in (True, False)
    )
    compare.equal(fast, plain, "the product")


@on_hopper
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 16, 33, 64, 128, 300])
def test_the_hopper_kernel_agrees_for_any_number_of_rows(m, dtype, device):
    check(*make(m, 1024, 136, 128, device, dtype), variant="hopper")


@on_hopper
@pytest.mark.parametrize("group_size", [32, 64, 128, -1])
def test_the_hopper_kernel_has_the_references_weights_bit_for_bit(group_size, device):
    k = 256
    x, packed, weights = make(k, k, 136, group_size, device)
    x = torch.eye(k, dtype=x.dtype, device=device)
    compare.equal(int4_matmul.int4_matmul(x, packed, variant="hopper").T.contiguous(), weights, "the product")


@on_hopper
def test_the_hopper_kernel_repeats_its_bits(device):
    x, packed, _ = make(16, 8192, 256, 128, device)
    workspace = Workspace.allocate(device)
    first, second = (int4_matmul.int4_matmul(x, packed, workspace=workspace, variant="hopper") for _ in range(2))
    compare.equal(first, second, "the second call's product")
    assert not workspace.arrivals.any(), "an arrival counter was not set back to zero"


@pytest.mark.skipif(HOPPER, reason="the GPU is one")
def test_the_hopper_kernel_says_why_it_cannot_run(device):
    x, packed, _ = make(2, 128, 64, 64, device)
    with pytest.raises(ValueError, match="needs a Hopper GPU"):
        int4_matmul.int4_matmul(x, packed, variant="hopper")
