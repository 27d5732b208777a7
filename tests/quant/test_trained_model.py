"""A model that computes sums, with outlier weights planted: where rounding fails, and AWQ and GPTQ do not."""

import copy

import pytest
import torch

from labkit.models import load_arithmetic, plant_outliers
from labkit.models.sums import exact_match, make_sums
from labkit.quant.awq import prepare_awq
from labkit.quant.gptq import quantize_gptq
from labkit.quant.grid import Scheme
from labkit.quant.inputs import observe_inputs
from labkit.quant.rtn import quantize_rtn

ROWS = Scheme(4)


@pytest.fixture(scope="module")
def sums():
    return make_sums(500, seed=10**9)


@pytest.fixture(scope="module")
def calibration():
    return make_sums(256, seed=10**9 + 7).tokens[:, :-1]


@pytest.fixture(scope="module")
def planted():
    return plant_outliers(load_arithmetic(), "weight", 20)


def right(model, sums):
    return exact_match(model, sums).float().mean().item()


def test_rounding_to_nearest_destroys_the_planted_model(planted, sums):
    model = copy.deepcopy(planted)
    quantize_rtn(model, ROWS)
    assert right(planted, sums) > 0.95 and right(model, sums) < 0.05


def test_awq_saves_the_planted_model(planted, sums, calibration):
    model = copy.deepcopy(planted)
    prepare_awq(model, observe_inputs(model, calibration, batch_size=256), ROWS)
    assert right(model, sums) > 0.95, "scaling and clipping alone must lose next to nothing"
    quantize_rtn(model, ROWS)
    assert right(model, sums) > 0.95


@pytest.mark.parametrize("by_loudness", [False, True])
def test_gptq_saves_the_planted_model(planted, sums, calibration, by_loudness):
    model = copy.deepcopy(planted)
    quantize_gptq(model, calibration, ROWS, by_loudness=by_loudness, batch_size=256)
    assert right(model, sums) > 0.9


def test_the_rounded_model_is_the_one_that_its_codes_say(planted):
    model = copy.deepcopy(planted)
    made = quantize_rtn(model, ROWS, lambda name, weight: weight * (2 if name.endswith("o_proj") else 1))
    state = dict(model.named_parameters())
    for name, one in made.items():
        assert torch.equal(state[f"{name}.weight"], one.dequantize()), name
    assert torch.equal(
        state["model.embed_tokens.weight"], dict(planted.named_parameters())["model.embed_tokens.weight"]
    )
    doubled, once = (m.model.layers[0].self_attn.o_proj.weight.abs().max() for m in (model, planted))
    assert doubled > 1.8 * once, "what `change` gave back was not used"
