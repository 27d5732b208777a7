"""What lab 3 experiments on: the head that ships, models with other weights, the row's picture and its sliders."""

from __future__ import annotations

import subprocess
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
import torch

from labkit import quantlab, quantwidget
from labkit.models import exact_match, load_arithmetic, make_sums, plant_outliers
from labkit.plots import quant_errors, quantizing
from labkit.quant import PER_CHANNEL, Scheme, clamp_sigmas, observe_inputs, quantize, round_trip
from labkit.quantlab import given, take_head

INT4 = Scheme(4, PER_CHANNEL)


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def head():
    return quantlab.load_head()


def test_a_clamp_lowers_the_heads_weight_error_and_raises_its_output_error_tenfold(head):
    plain, cut = round_trip(head.weight, INT4), round_trip(clamp_sigmas(head.weight, 3.0), INT4)
    assert head.weight_error(cut) < 0.95 * head.weight_error(plain), "the lab's plot says that it falls"
    assert head.output_error(cut) > 10 * head.output_error(plain), "the lab's plot says that it rises"


def test_the_same_clamp_saves_the_planted_model():
    planted, sums = plant_outliers(load_arithmetic(), "weight", 20.0), make_sums(300, seed=10**9)

    def share(change):
        return exact_match(quantlab.with_weights(planted, change), sums).float().mean().item()

    assert share(lambda _, w: w) > 0.99
    assert share(lambda _, w: round_trip(w, INT4)) < 0.05
    assert share(lambda _, w: round_trip(clamp_sigmas(w, 3.0), INT4)) > 0.9


@pytest.mark.smollm2
def test_the_head_is_that_of_the_real_model(smollm2, head):
    weight = smollm2[0].model.layers[take_head.LAYER].self_attn.k_proj.weight[: take_head.HEAD_DIM].float()
    assert torch.allclose(weight, head.weight, rtol=0.01, atol=1e-6), (
        "make it anew: python -m labkit.quantlab.take_head"
    )


def test_other_weights_go_into_a_copy_and_inputs_are_those_that_calibration_sees():
    model, tokens = load_arithmetic(), make_sums(8, seed=1).tokens[:, :-1]
    before = {n: m.weight.clone() for n, m in quantlab.linears(model).items()}
    zeros = quantlab.with_weights(model, lambda _, w: torch.zeros_like(w))
    assert all(not m.weight.any() for m in quantlab.linears(zeros).values())
    assert all(torch.equal(m.weight, before[n]) for n, m in quantlab.linears(model).items()), "the model itself changed"
    seen, ours = quantlab.linear_inputs(model, tokens), observe_inputs(model, tokens)
    assert set(seen) == set(ours)
    assert all(torch.allclose(x.abs().mean(0), ours[n].mean_abs, atol=1e-5) for n, x in seen.items())


def test_folding_any_scale_into_every_site_changes_no_logit():
    model, tokens = load_arithmetic(), make_sums(8, seed=1).tokens[:, :-1]

    def fold(before, weights, inputs):
        scales = torch.rand(inputs.shape[1], generator=torch.Generator().manual_seed(0)) + 0.5
        assert all(w.shape[1] == len(scales) == len(before) for w in weights)
        for weight in weights:
            weight.mul_(scales)
        before.div_(scales.reshape(-1, *[1] * (before.dim() - 1)))
        return scales

    folded = quantlab.fold_model(model, tokens, fold)
    with torch.no_grad():
        assert torch.allclose(folded(tokens).logits, model(tokens).logits, atol=1e-3)
    assert not torch.equal(folded.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)


def test_recorded_quality_has_every_case_for_both_texts():
    found = quantlab.recorded_quality()
    value, low, high = found["int4 per channel, clamp at 3 sigma"]["persuasion"]
    assert low < value < high and all(set(t) == {"persuasion", "devils_dictionary"} for t in found.values())
    with pytest.raises(ValueError, match="perplexity, KL, top-1"):
        quantlab.recorded_quality("BLEU")


def test_the_unquantized_model_has_a_perplexity_for_each_text_and_below_that_of_int4():
    plain, int4 = quantlab.recorded_unquantized(), quantlab.recorded_quality()["int4 g64, RTN"]
    assert plain.keys() == int4.keys()
    assert all(40 < plain[text] < int4[text][0] for text in plain)


def test_lines_that_coincide_are_both_seen():
    lines = quant_errors.error_chart({"weights": [0.1, 0.05], "k": [0.1, 0.05]}, (2, 3)).axes[0].get_lines()
    assert lines[0].get_linewidth() > lines[1].get_linewidth() and lines[0].get_marker() != lines[1].get_marker()


def test_the_row_chart_counts_what_lies_beyond_the_grid(head):
    view = quantizing.row_view(head, 0, 4, -1, 2.0, quantwidget.shipped)
    row = head.weight[0]
    beyond = (row > view.steps[-1] + 0.52 * view.steps[1] - 0.52 * view.steps[0]).sum()
    assert len(view.cut) >= beyond > 0
    words = [t.get_text() for t in quantizing.row_chart(view).findobj(matplotlib.text.Text)]
    assert f"{len(view.cut)} cut off" in words and "row 0, 4 bits, whole row, clamp at 2 sigma" in words


def test_the_clamp_chart_wants_as_many_errors_as_clamps():
    with pytest.raises(ValueError, match="equally long"):
        quantizing.clamp_chart([3.0], [0.1], [])
    figure = quantizing.clamp_chart([2.0, 3.0], [0.02, 0.01], [0.1, 0.01])
    assert [axes.get_title(loc="left") for axes in figure.axes] == [
        "Error of the weights",
        "Error of the outputs, on real inputs",
    ]


def test_the_sliders_move_picture_and_numbers(head):
    box = quantwidget.row_explorer(head, quantwidget.shipped)
    (row, bits), (clamp, group) = box.children[0].children, box.children[1].children
    picture, text = box.children[2:]
    seen = {(bytes(picture.value), text.value)}
    for control, value in ((bits, 3), (group, 64), (clamp, 2.0), (row, 5), (clamp, quantwidget.NO_CLAMP)):
        control.value = value
        seen.add((bytes(picture.value), text.value))
    assert len(seen) == 6, "a control changed nothing"
    assert "no limit" in text.value


def test_a_student_function_that_is_not_written_or_fails_is_replaced_and_that_is_said(head):
    def stub(*_):
        raise NotImplementedError

    def broken(*_):
        raise KeyError("group")

    view, note = quantwidget.view_or_shipped(head, 0, 4, -1, 3.0, stub)
    assert view is not None and note == "your function is not written yet: this is the camp's own"
    assert "raised KeyError" in quantwidget.view_or_shipped(head, 0, 4, -1, 3.0, broken)[1]


def test_where_the_answers_are_hidden_the_widget_says_why_there_is_no_picture(head, monkeypatch):
    monkeypatch.setitem(sys.modules, "labkit.quant", None)

    def stub(*_):
        raise NotImplementedError

    box = quantwidget.row_explorer(head, stub)
    assert "no picture: your function is not written yet" in box.children[3].value


def test_the_widgets_module_imports_without_any_jupyter_package():
    code = "import sys; sys.modules['ipywidgets'] = None; sys.modules['IPython'] = None; import labkit.quantwidget"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("group_size", [-1, 0, 16])
def test_what_later_answers_are_given_is_what_the_library_computes(group_size, symmetric):
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    codes, scales, zeros = given.quantize_weight(weight, 4, group_size, symmetric)
    rows = weight.reshape(1, -1) if group_size == 0 else weight
    made = quantize(rows, Scheme(4, group_size or -1, symmetric=symmetric))
    assert torch.equal(codes, made.codes.reshape(weight.shape))
    assert torch.equal(scales.flatten(), made.scales.flatten().float())
    assert torch.equal(zeros.flatten(), made.zeros.flatten())
    with pytest.raises(ValueError, match="5 does not divide the 32 inputs"):
        given.quantize_weight(weight, 4, 5)
