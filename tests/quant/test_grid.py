"""Grids, observers and clips: equal to torch.ao's where it has them, and refused by name where they do not fit."""

import itertools
import warnings

import pytest
import torch

from labkit.quant.clip import clamp_sigmas, output_error, search_clip
from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, encode, grid_of, quantize, round_trip
from labkit.quant.observers import MinMaxObserver

G = torch.Generator().manual_seed(0)
WEIGHT = torch.randn(64, 256, generator=G)


def torch_observer(scheme):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.ao.quantization import MinMaxObserver as OfTensor
        from torch.ao.quantization import PerChannelMinMaxObserver as OfChannel
    half = 2 ** (scheme.bits - 1)
    if scheme.symmetric:
        settings = {"dtype": torch.qint8, "quant_min": -half, "quant_max": half - 1}
        settings["qscheme"] = torch.per_tensor_symmetric if scheme.group_size == PER_TENSOR else None
    else:
        settings = {"dtype": torch.quint8, "quant_min": 0, "quant_max": scheme.top}
        settings["qscheme"] = torch.per_tensor_affine if scheme.group_size == PER_TENSOR else None
    if scheme.group_size == PER_TENSOR:
        return OfTensor(**settings)
    settings["qscheme"] = torch.per_channel_symmetric if scheme.symmetric else torch.per_channel_affine
    return OfChannel(ch_axis=0, **settings)


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [PER_TENSOR, PER_CHANNEL])
@pytest.mark.parametrize("shift", [0.0, 5.0, -5.0])
def test_an_observer_gives_the_scales_and_zeros_of_torch_ao(bits, symmetric, group_size, shift):
    scheme = Scheme(bits, group_size, symmetric)
    ours, theirs = MinMaxObserver(scheme), torch_observer(scheme)
    for seed in range(3):
        x = torch.randn(6, 33, generator=torch.Generator().manual_seed(seed)) + shift
        x[2] = 0
        ours.observe(x), theirs(x)
    scales, zeros = ours.grid()
    wanted, points = theirs.calculate_qparams()
    assert torch.equal(scales.flatten(), wanted.flatten())
    assert torch.equal(zeros.int().flatten(), points.int().flatten() + (2 ** (bits - 1) if symmetric else 0))


@pytest.mark.parametrize("shift", [0.0, 0.7])
def test_per_channel_codes_dequantize_to_what_torch_fakes(shift):
    scheme = Scheme()
    made = quantize(WEIGHT + shift, scheme)
    faked = torch.fake_quantize_per_channel_affine(
        WEIGHT + shift, made.scales[:, 0], made.zeros[:, 0].int(), 0, 0, scheme.top
    )
    # torch multiplies by 1 / scale: a number on the border of two steps may fall to the other side.
    other = ~torch.isclose(made.dequantize(), faked, atol=1e-6)
    assert other.float().mean() < 1e-3, "more than borders between two steps differ"


@pytest.mark.parametrize("group_size", [32, 64, 128])
def test_groups_are_rows_cut_into_pieces(group_size):
    whole = quantize(WEIGHT, Scheme(group_size=group_size))
    for i in range(WEIGHT.shape[1] // group_size):
        part = quantize(WEIGHT[:, i * group_size : (i + 1) * group_size], Scheme(group_size=PER_CHANNEL))
        assert torch.equal(whole.codes[:, i * group_size : (i + 1) * group_size], part.codes), f"group {i}"
        assert torch.equal(whole.scales[:, i, None], part.scales) and torch.equal(whole.zeros[:, i, None], part.zeros)


def test_no_number_within_the_range_moves_by_more_than_a_step_and_zero_stays():
    weight = WEIGHT.clone()
    weight[:, ::7] = 0
    for scheme in (Scheme(), Scheme(group_size=64), Scheme(group_size=PER_TENSOR), Scheme(8)):
        made = quantize(weight, scheme)
        moved = (scheme.grouped(made.dequantize()) - scheme.grouped(weight)).abs().amax(-1)
        assert bool((moved <= made.scales * 1.0001).all()) and bool((made.dequantize()[:, ::7] == 0).all())


def test_a_bit_more_is_worth_six_decibels():
    uniform = torch.rand(64, 4096, generator=G) * 2 - 1
    errors = [(round_trip(uniform, Scheme(bits)) - uniform).square().mean().log10() * 10 for bits in range(3, 9)]
    steps = [(a - b).item() for a, b in itertools.pairwise(errors)]
    assert all(5.7 < step < 7.4 for step in steps), steps


def test_a_symmetric_grid_has_its_zero_in_the_middle_and_all_its_codes():
    made = quantize(WEIGHT, Scheme(symmetric=True))
    assert made.zeros.unique().tolist() == [8]
    # 7.5 steps reach the largest magnitude: its tie goes to either neighbour by the last bit of the scale.
    lowest = quantize(-WEIGHT.abs(), Scheme(symmetric=True)).codes.amin(1)
    highest = quantize(WEIGHT.abs(), Scheme(symmetric=True)).codes.amax(1)
    assert lowest.unique().tolist() == [0, 1] and highest.unique().tolist() == [15]


def test_codes_fit_scales_that_are_rounded_to_fp16():
    scheme = Scheme(group_size=64, scale_dtype=torch.float16)
    made = quantize(WEIGHT * 0.003, scheme)
    assert made.scales.dtype == torch.float16
    again = encode(scheme.grouped(WEIGHT * 0.003), made.scales, made.zeros, scheme)
    assert torch.equal(again.reshape(WEIGHT.shape), made.codes)


@pytest.mark.parametrize("group_size", [PER_TENSOR, PER_CHANNEL, 64])
def test_a_weight_of_zeros_stays_one(group_size):
    made = quantize(torch.zeros(4, 128), Scheme(group_size=group_size))
    assert bool((made.dequantize() == 0).all()) and bool(torch.isfinite(made.scales).all())


def test_what_does_not_fit_is_refused_by_name():
    with pytest.raises(ValueError, match=r"group_size 128 does not divide the 576 inputs of q_proj.*such as 64"):
        quantize(torch.ones(64, 576), Scheme(group_size=128), name="q_proj")
    for bad in ({"bits": 1}, {"bits": 9}, {"group_size": -2}, {"scale_dtype": torch.int8}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            Scheme(**bad)
    with pytest.raises(ValueError, match=r"weight must be a matrix.*\[4\]"):
        quantize(torch.ones(4), Scheme())
    with pytest.raises(ValueError, match="weight holds numbers that are not finite"):
        quantize(torch.tensor([[1.0, float("nan")]]), Scheme())
    with pytest.raises(ValueError, match="low must be"):
        grid_of(torch.ones(2), torch.zeros(2), Scheme())


def test_an_observer_refuses_what_it_cannot_keep():
    with pytest.raises(ValueError, match="PER_TENSOR or PER_CHANNEL"):
        MinMaxObserver(Scheme(group_size=64))
    observer = MinMaxObserver(Scheme(group_size=PER_CHANNEL))
    with pytest.raises(RuntimeError, match="call observe first"):
        observer.grid()
    observer.observe(torch.ones(4, 2))
    observer.observe(torch.ones(4, 0))
    with pytest.raises(ValueError, match=r"5 channels.*had 4"):
        observer.observe(torch.ones(5, 2))
    with pytest.raises(ValueError, match="not finite"):
        observer.observe(torch.full((4, 2), torch.inf))


def test_a_clamp_cuts_at_the_sigmas_of_each_row_and_nothing_else():
    weight = WEIGHT.clone()
    weight[3, 5] = 40.0
    cut = clamp_sigmas(weight, 3)
    bound = weight[3].mean() + 3 * weight[3].std()
    torch.testing.assert_close(cut[3, 5], bound)
    inside = (weight - weight.mean(1, keepdim=True)).abs() < 2.99 * weight.std(1, keepdim=True)
    assert torch.equal(cut[inside], weight[inside]) and torch.equal(clamp_sigmas(weight, 1e6), weight)
    with pytest.raises(ValueError, match="sigmas must be positive"):
        clamp_sigmas(weight, 0)


def loud_inputs():
    """Inputs of which one channel in 32 is loud, and a weight that is large where the inputs are."""
    x = torch.randn(2048, 256, generator=torch.Generator().manual_seed(1))
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(2))
    x[:, ::32] *= 30
    weight[:, ::32] *= 4
    return x, weight, x.T @ x / len(x)


@pytest.mark.parametrize("group_size", [PER_CHANNEL, 64])
def test_each_clip_search_is_best_at_what_it_looks_at(group_size):
    x, weight, hessian = loud_inputs()
    scheme = Scheme(group_size=group_size)
    found = {
        "none": round_trip(weight, scheme),
        "weight": round_trip(search_clip(weight, scheme), scheme),
        "output": round_trip(search_clip(weight, scheme, hessian), scheme),
    }
    of_weight = {k: (w - weight).square().mean().item() for k, w in found.items()}
    of_output = {k: (x @ (w - weight).T).square().mean().item() for k, w in found.items()}
    assert min(of_weight, key=of_weight.get) == "weight", of_weight
    assert min(of_output, key=of_output.get) == "output", of_output
    assert of_output["weight"] > 2 * of_output["output"], "what looks at weights alone should cut the salient ones"


def test_three_sigmas_lose_less_of_the_weights_and_more_of_the_output():
    x = torch.randn(512, 4096, generator=torch.Generator().manual_seed(3))
    weight = torch.randn(32, 4096, generator=torch.Generator().manual_seed(4))
    x[:, 0] *= 30  # one loud input, which meets a weight of 4 sigmas in every row
    weight[:, 0] = 4
    lost = [made - weight for made in (round_trip(weight, Scheme()), round_trip(clamp_sigmas(weight, 3), Scheme()))]
    of_weight = [one.square().mean().item() for one in lost]
    of_output = [(x @ one.T).square().mean().item() for one in lost]
    assert of_weight[1] < of_weight[0] and of_output[1] > 2 * of_output[0], (of_weight, of_output)


def test_the_hessian_form_is_the_error_of_the_output():
    x, weight, hessian = loud_inputs()
    lost = round_trip(weight, Scheme()) - weight
    wanted = (x @ lost.T).square().sum(1).mean().item()
    assert output_error(lost, hessian) == pytest.approx(wanted, rel=1e-3)


def test_a_clip_search_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"hessian must be \[256, 256\]"):
        search_clip(WEIGHT, Scheme(), torch.eye(64))
    with pytest.raises(ValueError, match="weight error only"):
        search_clip(WEIGHT, Scheme(group_size=PER_TENSOR), torch.eye(256))
    with pytest.raises(ValueError, match="steps"):
        search_clip(WEIGHT, Scheme(), steps=0)
