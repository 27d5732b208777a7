"""The engine's benchmark, as far as it needs no GPU."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from labkit.benchmarks import engine as benchmark
from labkit.benchmarks.engine import Measured, floor_ms, measure, num_blocks, prompts_of, rows_of
from labkit.engine import ModelConfig
from labkit.models import QWEN3_0_6B, QWEN3_8B


def test_the_floor_is_the_bytes_of_weights_and_of_k_and_v_over_the_bandwidth():
    weights = 2 * (36 * (4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12288) + 151936 * 4096)
    assert floor_ms(QWEN3_8B, 1, 4.0) == pytest.approx(weights / 4e9, rel=0.01)
    kv = 64 * (128 + 64) * 36 * 2 * 8 * 128 * 2
    assert floor_ms(QWEN3_8B, 65, 4.0) - floor_ms(QWEN3_8B, 1, 4.0) == pytest.approx(kv / 4e9)
    assert floor_ms(QWEN3_0_6B, 1, 4.0) == pytest.approx(0.3, rel=0.05), "tied embeddings are read as the head"


def test_a_step_is_what_the_tokens_after_the_first_cost(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])

    def generate(prompts, tokens):
        assert len(prompts) == 4 and all(len(p) == 128 for p in prompts)
        now[0] += 0.5 + 0.01 * (tokens - 1)

    found = measure(generate, 4, 1000, rounds=3)
    assert found.step_ms == pytest.approx(10) and found.spread == pytest.approx(0, abs=1e-6)
    assert found.tokens_per_second == pytest.approx(4 * 128 / 1.77)


def test_the_cache_holds_the_largest_batch_to_its_end():
    assert num_blocks((1, 128)) * 16 >= 128 * 256
    assert prompts_of(2, 50) == prompts_of(2, 50) and max(map(max, prompts_of(16, 50))) == 49


def test_a_batch_gives_a_row_for_its_step_and_one_for_its_throughput():
    found = [
        {"case": "0.6B", "peer": peer, "batch": b, **asdict(Measured(factor * b, 100 / factor, 0.01))}
        for peer, factor in (("ours", 1), ("own_eager", 4), ("vllm_graph", 2))
        for b in benchmark.CASES["0.6B"][1]
    ]
    failed = {"case": "0.6B", "peer": "vllm_eager", "error": "out of memory"}
    rows = rows_of([failed, *found], 4.0)
    assert [r.case for r in rows[:2]] == [
        f"{k}: 0.6B, batch 1, 128 + 128 tokens" for k in ("decode step", "throughput")
    ]
    assert len(rows) == 6 and all(r.ratio("vllm_graph") == 2 and r.ratio("own_eager") == 4 for r in rows)
    assert set(rows[0].peers) - set(rows[1].peers) == {"byte_floor"}
    text = benchmark.summary(rows)
    assert "decode step against vLLM with graphs: geometric mean 2.000x, worst 2.000x" in text


def test_the_config_that_vllm_reads_is_the_model_that_we_run(tmp_path):
    graph, eager = benchmark.vllm_specs("8B", tmp_path)
    assert graph.model == eager.model and eager.options["enforce_eager"]
    assert graph.options["compilation_config"]["cudagraph_capture_sizes"] == [1, 16, 64, 128]
    config = ModelConfig.from_folder(graph.model)
    ours = ModelConfig.from_shape(QWEN3_8B)
    different = {name for name in vars(ours) if getattr(ours, name) != getattr(config, name)}
    assert different == {"eos_token_ids"}, "which are ignored"


class Up:
    """An engine process that starts, and answers after the time that its steps take."""

    fails = ()

    def __init__(self, spec, log):
        self.name = spec.name

    def wait(self):
        if self.name in self.fails:
            raise RuntimeError("no memory")

    def measure(self, batch):
        assert len(batch.prompts) == len(batch.outputs)
        return {"seconds": 1.0 + 0.02 * (batch.outputs[0] - 1)}

    def stop(self):
        stopped.append(self.name)


stopped: list[str] = []


def test_an_engine_that_does_not_start_costs_its_own_rows_alone(monkeypatch):
    monkeypatch.setattr(Up, "fails", ("0.6B-vllm_eager",))
    monkeypatch.setattr(benchmark, "EngineProcess", Up)
    monkeypatch.setattr(benchmark, "_has_vllm", lambda: True)
    monkeypatch.setattr(benchmark, "random_weights", lambda *args: None)
    monkeypatch.setattr(benchmark, "make_engine", lambda *args: None)
    monkeypatch.setattr(benchmark, "check_tokens", lambda *args: None)
    monkeypatch.setattr(benchmark, "measure", lambda *args: Measured(10.0, 100.0, 0.0))
    found = list(benchmark.samples(["0.6B"]))
    assert [s["peer"] for s in found if "error" in s] == ["vllm_eager"]
    rows = rows_of(found, 4.0)
    assert len(rows) == 6 and set(rows[0].peers) == {"vllm_graph", "own_eager", "byte_floor"}
    assert rows[0].ratio("vllm_graph") == pytest.approx(2)
    assert stopped == ["0.6B-vllm_eager", "0.6B-vllm_graph"], "every process that was started is ended"
