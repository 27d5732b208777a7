"""Engines of a notebook: what can be said of them without starting one, and that a failed start says why."""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from labkit import models
from labkit.quant import read_quantized
from labkit.serve import engines
from labkit.serve.plugins import attention


def test_the_gate_lets_our_kernels_through_and_says_what_is_wrong_with_others():
    assert engines.refusal(attention.kernels_attention) == ""
    assert engines.refusal(lambda *given: attention.kernels_attention(*given[:-1], 1.0)).startswith("decode steps: o[")
    assert "ZeroDivisionError" in engines.refusal(lambda *given: 1 / 0)
    assert "has shape" in engines.refusal(lambda q, *others: q[:1])


def test_an_attention_that_is_right_for_decode_steps_alone_is_refused():
    def decodes_only(q, k_cache, v_cache, table, seq_lens, starts, scale):
        if q.shape[0] == seq_lens.shape[0]:
            return attention.kernels_attention(q, k_cache, v_cache, table, seq_lens, starts, scale, decode=True)
        return q.clone()

    assert engines.refusal(decodes_only).startswith("chunks of prompts among decode steps: ")


def test_the_int4_checkpoint_and_its_dequantized_copy_hold_the_same_weights():
    found = engines.int4_checkpoint()
    assert engines.int4_checkpoint() == found
    model, _ = models.load_model(str(found.dequantized))
    name, one = next(iter(read_quantized(found.served).items()))
    assert (one.dequantize() - model.get_parameter(f"{name}.weight")).abs().max() < 1e-3


def test_recorded_runs_come_by_unit_and_cell_and_half_a_factorial_is_none(tmp_path, monkeypatch):
    rows = [
        {"case": f"8B: caching {c}, graphs {g}, run {run}", "unit": unit, "ours": 1.0 + run, "variant": "factorial"}
        for c in ("on", "off") for g in ("on", "off") for run in range(2) for unit in ("ms TTFT", "ms a token")
        if unit == "ms TTFT" or c == "on"
    ]  # fmt: skip
    rows.append({"case": "Qwen3-8B: batch 1", "unit": "ms TTFT", "ours": 99.0, "variant": "graphs"})
    (tmp_path / "vllm.some-gpu.json").write_text(json.dumps({"rows": rows}))
    monkeypatch.setattr(engines, "EVIDENCE", tmp_path)
    cells = {(c, g): [1.0, 2.0] for c in (False, True) for g in (False, True)}
    assert engines.recorded_factorial() == {"ms TTFT": cells}


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its rules cannot be asked")
def test_the_graph_mode_is_that_of_a_device_with_graphs_and_an_eager_engine_has_none():
    for caching in (True, False):
        assert engines.graph_mode(enable_prefix_caching=caching) == "FULL_AND_PIECEWISE"
    assert engines.graph_mode(enforce_eager=True) == "NONE"


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: no engine can be started")
def test_an_engine_that_cannot_start_says_why(tmp_path):
    with pytest.raises(RuntimeError, match=r"vLLM failed: .*block"):
        engines.answer({"a": [1, 2, 3]}, dtype="float32", block_size=7)
