"""AWQ: scales that change nothing before quantization, and the output's error after it."""

import copy

import pytest
import torch

from labkit.quant.awq import prepare_awq, scale_site, search_scales
from labkit.quant.clip import output_error
from labkit.quant.grid import PER_CHANNEL, Scheme, round_trip
from labkit.quant.inputs import Inputs, decoder_layers, layer_calls, linears_of, observe_inputs, sites_of
from labkit.quant.rtn import quantize_rtn


def sites(model):
    return [site for named in decoder_layers(model) for site in sites_of(*named)]


def logits(model, tokens):
    with torch.no_grad():
        return model(tokens).logits


def test_statistics_are_those_of_what_each_linear_reads(model, tokens):
    seen = []
    down = model.model.layers[1].mlp.down_proj
    handle = down.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    found = observe_inputs(model, tokens, batch_size=3)
    handle.remove()
    read, x = found["model.layers.1.mlp.down_proj"], torch.cat(seen)
    assert read.count == tokens.numel()
    torch.testing.assert_close(read.hessian, x.T @ x / len(x), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(read.mean_abs, x.abs().mean(0), rtol=1e-4, atol=1e-5)
    assert found.keys() == linears_of(model).keys() and len(found) == 14
    assert found["model.layers.0.self_attn.q_proj"] is found["model.layers.0.self_attn.v_proj"]


def test_no_hook_is_left_behind(model, tokens):
    observe_inputs(model, tokens)
    calls = layer_calls(model, tokens, 3)
    assert [len(hidden) for hidden, _ in calls] == [3, 3, 2]
    assert not any(module._forward_pre_hooks for module in model.modules())


def test_a_scaled_model_computes_the_same_at_every_site(any_family, tokens):
    wanted = logits(any_family, tokens)
    for i in range(len(sites(any_family))):
        model = copy.deepcopy(any_family)
        site = sites(model)[i]
        generator = torch.Generator().manual_seed(i)
        per_writer = torch.rand(int(site.writer.max()) + 1, generator=generator) * 4 + 0.1
        if getattr(site.before, "bias", None) is not None:
            torch.nn.init.normal_(site.before.bias)
            wanted_here = logits(model, tokens)
        else:
            wanted_here = wanted
        scale_site(site, per_writer[site.writer])
        off = (logits(model, tokens) - wanted_here).abs().max() / wanted_here.abs().max()
        assert off < 1e-4, f"{site.names}: {off}"


def test_scales_find_a_loud_channel_and_lower_the_error_of_the_output():
    x = torch.randn(2048, 128, generator=torch.Generator().manual_seed(0))
    x[:, 5] *= 30
    weight = torch.randn(64, 128, generator=torch.Generator().manual_seed(1))
    inputs = Inputs.none(128, x.device)
    inputs.add(x)
    for scheme in (Scheme(4, PER_CHANNEL), Scheme(3, 64)):
        scales = search_scales(weight, inputs, scheme)
        before, after = (
            (x @ (made - weight).T).square().sum(1).mean().item()
            for made in (round_trip(weight, scheme), round_trip(weight * scales, scheme) / scales)
        )
        assert scales.argmax() == 5 and after < 0.5 * before, (scheme, before, after)


def test_a_search_that_finds_nothing_better_scales_nothing():
    weight = torch.tensor([[0.0, 15.0], [15.0, 0.0]])  # on its grid: nothing is lost
    assert torch.equal(search_scales(weight, Inputs(torch.eye(2), torch.tensor([1.0, 9.0])), Scheme()), torch.ones(2))


def test_query_heads_that_share_a_v_share_its_scales(model, tokens):
    found = prepare_awq(model, observe_inputs(model, tokens), Scheme(4, 64), clip=False)
    scales = found["model.layers.0.self_attn.o_proj"].reshape(2, 2, 32)  # [kv heads, queries of each, head_dim]
    assert torch.equal(scales[:, 0], scales[:, 1]) and not torch.equal(scales[0, 0], scales[1, 0])


@pytest.mark.parametrize("scheme", [Scheme(4, 64), Scheme(3, PER_CHANNEL)])
def test_each_step_of_awq_brings_the_outputs_closer(pristine, tokens, scheme):
    inputs, wanted = observe_inputs(pristine, tokens), logits(pristine, tokens)
    errors = {}
    for name, steps in {"rtn": None, "scale": {"clip": False}, "clip": {"scale": False}, "both": {}}.items():
        model = copy.deepcopy(pristine)
        if steps is not None:
            prepare_awq(model, inputs, scheme, **steps)
        quantize_rtn(model, scheme)
        errors[name] = (logits(model, tokens) - wanted).square().mean().item()
    assert errors["scale"] < 0.8 * errors["rtn"] and errors["both"] < errors["rtn"], errors
    assert errors["clip"] < errors["rtn"], errors


def test_the_error_that_counts_is_that_of_the_scaled_inputs(model, tokens):
    """A clip after the scales must look at the inputs as the scales left them."""
    inputs = observe_inputs(model, tokens)
    read = inputs["model.layers.0.mlp.down_proj"]
    scales = torch.rand(256, generator=torch.Generator().manual_seed(0)) + 0.5
    lost = torch.randn(128, 256, generator=torch.Generator().manual_seed(1))
    assert output_error(lost * scales, read.scaled(scales).hessian) == pytest.approx(
        output_error(lost, read.hessian), rel=1e-4
    )


def test_what_does_not_fit_is_refused_and_the_model_stays_whole(model, tokens):
    before = {name: linear.weight.clone() for name, linear in linears_of(model).items()}
    inputs = observe_inputs(model, tokens)
    del inputs["model.layers.1.mlp.down_proj"]
    with pytest.raises(ValueError, match=r"inputs lacks model\.layers\.1\.mlp\.down_proj"):
        prepare_awq(model, inputs, Scheme(4, 64))
    with pytest.raises(ValueError, match=r"group_size 96 does not divide the 128 inputs of model\.layers\.0"):
        quantize_rtn(model, Scheme(4, 96))
    assert all(torch.equal(linear.weight, before[name]) for name, linear in linears_of(model).items())
    with pytest.raises(ValueError, match="alike for inputs that come from one output"):
        scale_site(sites(model)[1], torch.arange(1.0, 129.0))
    with pytest.raises(ValueError, match="positive and finite"):
        scale_site(sites(model)[0], torch.zeros(128))
    with pytest.raises(ValueError, match="inputs must be of"):
        search_scales(torch.ones(4, 8), Inputs.none(4, torch.device("cpu")), Scheme())
    with pytest.raises(ValueError, match=r"tokens must be \[sequences, length\]"):
        observe_inputs(model, tokens[0])
    with pytest.raises(ValueError, match="model must be one of llama"):
        linears_of(torch.nn.Linear(2, 2))
