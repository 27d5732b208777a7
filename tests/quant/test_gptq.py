"""GPTQ: beside brute force, beside rounding, and over a whole model."""

import copy

import pytest
import torch

from labkit.quant.clip import output_error
from labkit.quant.gptq import gptq_weight, quantize_gptq
from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, encode, quantize, round_trip
from labkit.quant.inputs import linears_of, observe_inputs

X = torch.randn(1024, 192, generator=torch.Generator().manual_seed(0)) @ torch.randn(
    192, 192, generator=torch.Generator().manual_seed(1)
)  # correlated, so that one column can make up for another
HESSIAN = X.T @ X / len(X)
WEIGHT = torch.randn(32, 192, generator=torch.Generator().manual_seed(2))


def by_hand(weight, hessian, scheme, damping):
    """The paper's update with the inverse of what is left of H computed anew for each column (OBQ in a fixed order)."""
    plain = quantize(weight, scheme)
    width = weight.shape[1]
    rest, codes = weight.double().clone(), torch.empty_like(plain.codes)
    damped = hessian.double() + torch.eye(width) * damping * hessian.double().diagonal().mean()
    for i in range(width):
        inverse = torch.linalg.inv(damped[i:, i:])
        group = i // (scheme.group_size if scheme.group_size > 0 else width)
        scale, zero = plain.scales[:, group], plain.zeros[:, group]
        codes[:, i] = encode(rest[:, i, None], scale, zero, scheme)[:, 0]
        error = rest[:, i] - (codes[:, i].double() - zero.double()) * scale.double()
        rest[:, i:] -= error[:, None] * inverse[0] / inverse[0, 0]
    return codes


@pytest.mark.parametrize("scheme", [Scheme(4, PER_CHANNEL), Scheme(3, 64), Scheme(4, 96, symmetric=True)])
def test_codes_are_those_of_the_plain_algorithm(scheme):
    """192 columns are more than one block: the errors of the first must have reached the second."""
    ours = gptq_weight(WEIGHT, HESSIAN, scheme, by_loudness=False).codes
    other = (ours != by_hand(WEIGHT, HESSIAN, scheme, 0.01)).float().mean()
    assert other < 0.002, f"{other:.1%} of the codes differ: more than numbers on the border of two steps"


@pytest.mark.parametrize("by_loudness", [False, True])
@pytest.mark.parametrize(
    "scheme", [Scheme(4, PER_CHANNEL), Scheme(4, 64), Scheme(3, 32), Scheme(4, 64, symmetric=True)]
)
def test_the_output_loses_less_than_by_rounding_and_the_weights_more(scheme, by_loudness):
    made = gptq_weight(WEIGHT, HESSIAN, scheme, by_loudness=by_loudness).dequantize() - WEIGHT
    rounded = round_trip(WEIGHT, scheme) - WEIGHT
    assert output_error(made, HESSIAN) < 0.7 * output_error(rounded, HESSIAN)
    assert made.square().sum() > rounded.square().sum()


def test_inputs_that_have_nothing_in_common_leave_only_rounding():
    scheme = Scheme(4, 64)
    made = gptq_weight(WEIGHT, torch.diag(torch.rand(192, generator=torch.Generator().manual_seed(3)) + 0.1), scheme)
    assert torch.equal(made.codes, quantize(WEIGHT, scheme).codes)


def test_an_order_changes_codes_and_no_grid():
    scheme = Scheme(4, 64)
    louder = torch.ones(192)
    louder[150] = 20
    loud = HESSIAN * louder * louder[:, None]
    first, lying = (gptq_weight(WEIGHT, loud, scheme, by_loudness=order) for order in (True, False))
    assert torch.equal(first.scales, lying.scales) and torch.equal(first.zeros, lying.zeros)
    plain = quantize(WEIGHT, scheme).codes
    assert torch.equal(first.codes[:, 150], plain[:, 150]), "the loudest input comes first, and nothing before it erred"
    assert not torch.equal(lying.codes[:, 150], plain[:, 150])


def test_inputs_that_are_always_0_are_no_trouble():
    hessian = HESSIAN.clone()
    hessian[7], hessian[:, 7] = 0, 0
    made = gptq_weight(WEIGHT, hessian, Scheme())
    assert torch.equal(made.codes[:, 7], quantize(WEIGHT, Scheme()).codes[:, 7])
    assert torch.equal(gptq_weight(WEIGHT, hessian * 0, Scheme()).codes, quantize(WEIGHT, Scheme()).codes)


def test_a_whole_model_loses_less_and_its_weights_are_on_their_grids(pristine, tokens):
    scheme = Scheme(3, 64, scale_dtype=torch.float16)
    with torch.no_grad():
        wanted = pristine(tokens).logits
        errors = {}
        for name in ("rtn", "gptq"):
            model = copy.deepcopy(pristine)
            if name == "gptq":
                made = quantize_gptq(model, tokens, scheme, batch_size=3)
                for layer, linear in linears_of(model).items():
                    assert torch.equal(linear.weight, made[layer].dequantize())
            else:
                for linear in linears_of(model).values():
                    linear.weight.copy_(round_trip(linear.weight, scheme))
            errors[name] = (model(tokens).logits - wanted).square().mean().item()
    assert errors["gptq"] < 0.8 * errors["rtn"], errors


def test_a_layer_reads_what_the_quantized_ones_before_it_give(pristine, tokens):
    """With the first layer's weights gone, the second's inputs differ, and so must its codes."""
    scheme = Scheme(2, 64)
    last = "model.layers.1.mlp.down_proj"
    sequential = quantize_gptq(copy.deepcopy(pristine), tokens, scheme)[last]
    single = gptq_weight(linears_of(pristine)[last].weight, observe_inputs(pristine, tokens)[last].hessian, scheme)
    assert (sequential.codes != single.codes).float().mean() > 0.01


def test_what_does_not_fit_is_refused_by_name(model, tokens):
    with pytest.raises(ValueError, match=r"hessian must be \[192, 192\]"):
        gptq_weight(WEIGHT, torch.eye(4), Scheme())
    with pytest.raises(ValueError, match="PER_CHANNEL"):
        gptq_weight(WEIGHT, HESSIAN, Scheme(4, PER_TENSOR))
    with pytest.raises(ValueError, match="damping must be positive"):
        gptq_weight(WEIGHT, HESSIAN, Scheme(), damping=0)
    with pytest.raises(ValueError, match="hessian must be the mean"):
        gptq_weight(WEIGHT, -HESSIAN, Scheme())
    before = model.model.layers[0].self_attn.q_proj.weight.clone()
    with pytest.raises(ValueError, match=r"group_size 96 does not divide the 128 inputs of model\.layers\.0"):
        quantize_gptq(model, tokens, Scheme(4, 96))
    assert torch.equal(model.model.layers[0].self_attn.q_proj.weight, before)
