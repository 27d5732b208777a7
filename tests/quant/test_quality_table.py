"""The table of what quantization costs: made recipe by recipe, gone on with, and held to what was aimed at."""

import copy
import json

import pytest
import torch

from labkit.benchmarks import evidence, quant_quality
from labkit.benchmarks.quant_quality import Calibration, recipes
from labkit.quant.inputs import linears_of, observe_inputs
from labkit.texts import EVALUATION
from tests.test_evidence import quoted

FILE = evidence.FOLDER / "quant_quality.cpu.json"


@pytest.fixture
def small(monkeypatch, pristine, tokens):
    """The benchmark on a tiny model and random tokens, with two recipes."""
    kept = {name: recipe for name, recipe in recipes().items() if "RTN" in name and "g64" in name}
    monkeypatch.setattr(quant_quality, "load_model", lambda *_, **__: (pristine, None))
    monkeypatch.setattr(quant_quality, "token_windows", lambda *_: tokens[:2])
    monkeypatch.setattr(quant_quality, "calibration_windows", lambda *_: tokens)
    monkeypatch.setattr(quant_quality, "recipes", lambda: kept)
    return kept


def test_every_recipe_changes_every_linear_and_leaves_the_output_head(pristine, tokens):
    calibration = Calibration(tokens, observe_inputs(pristine, tokens))
    for name, (recipe, beside) in recipes().items():
        assert beside in recipes(), f"{name} stands beside {beside}, which is no recipe"
        if "192" in name:
            continue  # divides SmolLM2's dimensions, and not the tiny model's
        model = copy.deepcopy(pristine)
        recipe(model, calibration)
        for layer, linear in linears_of(model).items():
            before = linears_of(pristine)[layer].weight
            assert torch.isfinite(linear.weight).all() and not torch.equal(linear.weight, before), f"{name}: {layer}"
        assert torch.equal(model.lm_head.weight, pristine.lm_head.weight), name


def test_a_run_that_was_stopped_goes_on_with_what_is_missing(small, tmp_path, capsys):
    path = tmp_path / "quant_quality.cpu.json"
    first = quant_quality.run(path, "int4", {})
    assert {row.case for row in first} == {
        f"int4 g64, RTN: {kind}, {text}" for kind in ("KL", "perplexity", "top-1") for text in EVALUATION
    } | {f"int3 g64, RTN: {kind}, {text}" for kind in ("KL", "perplexity", "top-1") for text in EVALUATION}
    said = capsys.readouterr().out
    assert "int4 g64, RTN, persuasion: perplexity" in said
    lines = json.loads(path.read_text())["rows"]
    path.write_text(json.dumps(json.loads(path.read_text()) | {"rows": lines[:6]}))
    again = quant_quality.run(path, "", {})
    assert again == first and "int4" not in capsys.readouterr().out, "what was there should have been kept"
    assert evidence.load(path).file_name == path.name
    quant_quality.run(path, "", {})
    assert not capsys.readouterr().out, "nothing was missing"


def test_a_text_that_does_not_ship_is_measured_for_what_it_lacks(small, tokens, monkeypatch, tmp_path, capsys):
    path, text = tmp_path / "quant_quality.cpu.json", tmp_path / "other.txt"
    text.write_text("another book", encoding="utf-8")
    monkeypatch.setattr(quant_quality, "cut_windows", lambda tokenizer, given, *_: tokens[:2] if given else None)
    first = quant_quality.run(path, "int4", {})
    capsys.readouterr()
    every = quant_quality.run(path, "int4", {}, {"other": text})
    added = every[len(first) :]
    assert every[: len(first)] == first and {row.case.rsplit(", ", 1)[1] for row in added} == {"other"}
    assert "persuasion" not in capsys.readouterr().out, "what was there was measured again"


def rows():
    return {row.case: row for row in evidence.load(FILE).rows}


def kl(name):
    """KL on each text."""
    return [rows()[f"{name}: KL, {text}"] for text in EVALUATION]


def test_int4_in_groups_of_64_is_as_near_as_it_should_be():
    assert kl("int4 g64, AWQ scales, clip and GPTQ")[0].ours <= 0.126 * 1.05


def test_at_three_bits_at_least_45_percent_of_what_rounding_loses_is_won_back():
    won = [1 - row.ours / row.peers["rtn"] for row in kl("int3 g64, AWQ scales, clip and GPTQ")]
    assert sum(won) / len(won) >= 0.45


def test_every_recipe_is_recorded_and_autoawq_itself():
    recorded = {case.rsplit(": ", 1)[0] for case in rows()}
    assert recorded == {*recipes(), "int4 g64, AutoAWQ 0.2.9"}


def test_each_row_lies_in_its_interval_and_beside_the_right_rounding():
    table = rows()
    for case, row in table.items():
        assert row.interval is not None and row.interval[0] <= row.ours <= row.interval[1], case
        name, what = case.rsplit(": ", 1)
        if what.startswith("KL") and name in recipes():
            assert row.peers == {"rtn": table[f"{recipes()[name][1]}: {what}"].ours}, case


def test_the_quoted_figures_follow_from_the_rows():
    best, awq, rtn = (kl(f"int4 g64, {how}") for how in ("AWQ scales, clip and GPTQ", "AWQ scales and clip", "RTN"))
    for i, beginning in enumerate(("KL on Persuasion, 4 bits in groups of 64:", "The same on the Devil's Dictionary:")):
        assert quoted(beginning)[:3] == pytest.approx([rtn[i].ours, awq[i].ours, best[i].ours], abs=6e-4)
    won = [100 * (1 - row.ours / row.peers["rtn"]) for row in kl("int3 g64, AWQ scales, clip and GPTQ")]
    assert quoted("AWQ's scales with GPTQ win back")[:2] == pytest.approx(won, abs=0.06)
    named = ("RTN", "AWQ scales and clip", "AWQ scales, clip and GPTQ")
    handbook = [rows()[f"int4 g64, {how}: KL, debian_handbook"].ours for how in named]
    assert quoted("which does not ship:")[:3] == pytest.approx(handbook, abs=6e-4)
    autoawq = [row.ours for row in kl("int4 g64, AutoAWQ 0.2.9")]
    assert quoted("tokens of the same books: KL")[:2] == pytest.approx(autoawq, abs=6e-4)
    clamp = kl("int4 per channel, clamp at 3 sigma")[0]
    assert quoted("a clamp at 3 sigma, KL on Persuasion:")[:2] == pytest.approx(
        [clamp.ours, clamp.peers["rtn"]], abs=6e-4
    )
    blocks = [
        kl(f"{kind} blocks of 32{more}")[0].ours for kind, more in (("Q4_K", ", super-blocks of 192"), ("Q4_0", ""))
    ]
    assert [quoted("Q4_K blocks cost KL")[0], quoted("has no such help:")[0]] == pytest.approx(blocks, abs=6e-4)
    eight = [
        kl(f"{kind} per channel{more}")[0].ours
        for kind, more in (("int8", ", RTN"), ("fp8 e4m3", ""), ("fp8 e5m2", ""))
    ]
    assert quoted("8 bits, KL on Persuasion:")[:3] == pytest.approx(eight, abs=6e-5)
