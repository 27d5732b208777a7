"""Lab 3's experiments, run with the answers that its checks compare with."""

import pytest
import torch

from labkit import quant
from labkit.checks.lab3_int4_quantization import caching, formats, packing, propagating
from labkit.quantlab import experiments, illusions, trials


def test_errors_halve_with_each_bit_and_are_those_of_the_weights_on_random_inputs():
    curve = experiments.error_curve(propagating.expected, (3, 4, 5))
    for name, errors in curve.items():
        assert 1.6 < errors[0] / errors[1] < 2.6 and 1.6 < errors[1] / errors[2] < 2.6, f"{name}: {errors}"
    assert curve["k of random inputs"][1] == pytest.approx(curve["weights"][1], rel=0.1)
    assert curve["k"][1] < 0.5 * curve["weights"][1], "trained weights answer to their inputs more than to noise"


def test_the_norm_spends_its_bits_no_better_than_a_coin_on_this_model():
    found = experiments.cache_experiment(lambda x, bits: caching.rounded(x, bits).float(), caching.controlled)
    policies = found["policies"]
    assert policies["by norm"][0] == pytest.approx(policies["by coin"][0]), "the two must spend as many bits"
    assert policies["static int8"][1] < policies["static int6"][1] < policies["static int4"][1]
    assert policies["by norm"][1] > policies["by coin"][1], "the lab says that the norm is a poor guide here"
    assert abs(found["norm of a cache and its damage"]) < 0.6


def test_formats_are_compared_with_all_their_bytes():
    rows = experiments.shoot_out(formats.expected, prompts=60)
    assert {name: round(bits, 3) for name, (bits, _, _) in rows.items()} == {
        "fp16": 16.0, "fp8": 8.104, "q4_0": 4.5, "q4_k": 4.5, "awq, scales unsearched": 4.156, "awq": 4.156
    }  # fmt: skip
    assert rows["awq"][1] < 0.01 * rows["awq, scales unsearched"][1], "searched scales save the planted columns"


def test_much_damping_leaves_nothing_of_gptq():
    near, far = trials.damping_in_gptq((0.01, 1e4))
    assert near > 1 and far < 0.01


def test_packed_matrices_are_what_the_format_says():
    qweight, qzeros, scales = experiments.packed_matrix(packing.packed, 16, 64, 32)
    awq = quant.from_awq({"qweight": qweight.cpu(), "qzeros": qzeros.cpu(), "scales": scales.cpu()})
    assert awq.codes.shape == (16, 64) and awq.scales.shape == (16, 2)


def test_the_least_time_of_int4_is_that_of_bf16_at_many_rows_and_a_quarter_at_one():
    assert illusions.floor_us(2048, "int4, groups of 128") == illusions.floor_us(2048, "bf16")
    assert 3.5 < illusions.floor_us(1, "bf16") / illusions.floor_us(1, "int4, groups of 128") < 4


def test_scales_for_tokens_and_for_channels_both_help_and_e4m3_needs_one():
    worst, best = illusions.product_error(False, False), illusions.product_error(True, True)
    assert best < 0.1 * min(illusions.product_error(True, False), illusions.product_error(False, True)) < worst
    loud = torch.randn(1000, generator=torch.Generator().manual_seed(0)) * 1000
    assert illusions.fp8_error(loud, True) < 0.03 < 0.5 < illusions.fp8_error(loud, False)
