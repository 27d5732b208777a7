"""The vLLM benchmark: what it measures, and what its rows are made of."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest

from labkit.benchmarks import vllm
from labkit.benchmarks.vllm_engine import Batch, EngineProcess, EngineSpec, divergence, pin
from labkit.models import QWEN3_8B, ModelShape
from labkit.serve import graphs

STEPS = [["FULL", 5, 8, 10], ["NONE", 300, 300, 1]]


def sample(engine: str, step_ms: float, number: int = 1, **more) -> dict:
    row = {"group": "8b", "engine": engine, "case": "batch 5", "round": number, "seconds": 2.0, "tokens": 640}
    return {**row, "step_ms": step_ms, "steps": STEPS, **more}


def test_rows_put_fitted_sizes_beside_vllms_graphs_and_our_attention_beside_its_backends():
    found = [
        *(sample("fa3", ms) for ms in (8.0, 9.0)),
        *(sample("fitted", ms) for ms in (7.0, 7.0)),
        sample("ours", 6.0),
        sample("vllm_triton", 12.0),
        {"group": "8b-modes", "engine": "vllm_eager", "case": "batch 5", "round": 1, "error": "it died"},
        {"group": "8b", "engine": "fa3", "case": "batch 5", "agreed": {"fa3": 1.0, "ours": 0.9, "vllm_triton": 0.8}},
    ]
    rows = {(row.variant, row.unit): row for row in vllm.rows_of(found)}
    assert rows["graphs", "ms a step"].ours == 7.0
    assert rows["graphs", "ms a step"].peers == {"vllm_graph": 8.5}, "an engine that died is no peer"
    assert rows["attention", "ms a step"].peers == {"vllm_triton": 12.0, "fa3": 8.5}
    assert rows["graphs", "% padded rows"].ours == pytest.approx(37.5), "eager steps pad nothing and do not count"
    assert rows["graphs", "% steps without a graph"].ours == pytest.approx(100 / 11, abs=1e-3)
    assert rows["attention", "% tokens as fa3"].ours == 90.0
    assert rows["graphs", "tok/s"].better == "higher" and rows["graphs", "tok/s"].ours == 320.0


def test_modes_are_put_beside_the_fitted_engine_of_their_own_run():
    found = [
        {**sample("fitted", ms), "group": group}
        for group, ms in (("8b", 7.0), ("8b-modes", 9.0))
    ] + [{**sample("vllm_eager", 27.0), "group": "8b-modes"}, sample("fa3", 14.0)]  # fmt: skip
    steps = {row.variant: (row.ours, row.peers) for row in vllm.rows_of(found) if row.unit == "ms a step"}
    assert steps == {"graphs": (7.0, {"vllm_graph": 14.0}), "modes": (9.0, {"vllm_eager": 27.0})}


def test_an_engine_that_was_started_again_stands_beside_itself():
    found = [sample("fa3", 8.0), sample("fa3", 8.0, seconds=4.0, started=1), sample("fitted", 7.0, started=1)]
    [row] = [row for row in vllm.rows_of(found) if row.variant == "again"]
    assert (row.case, row.unit, row.ours, row.peers) == ("Qwen3-8B: batch 5", "tok/s", 160.0, {"first_start": 320.0})


def test_captures_are_timed_of_one_engine_at_a_time_once_all_have_started(monkeypatch):
    waiting, log = set(), []

    class Engine:
        def __init__(self, spec, path):
            self.name, self.times = path.stem, 0
            waiting.add(self.name)

        def wait(self):
            waiting.remove(self.name)

        def pin(self):
            assert self.name not in waiting

        def recapture(self):
            assert not waiting
            self.times += 1
            log.append(self.name)
            return {"capture_seconds": float(self.times), "capture_bytes": 2**30}

        def stop(self):
            log.append("stopped")

    monkeypatch.setattr(vllm, "EngineProcess", Engine)
    found: list[dict] = []
    vllm.measure_captures(found.append, rounds=3)
    assert log[-4:] == ["stopped"] * 4 and log.count("8b-fitted") == log.count("0.6b-fa3") == 4
    rows = {(row.case, row.unit): row for row in vllm.rows_of(found)}
    row = rows["Qwen3-8B: all batches", "s of capture"]
    assert (row.ours, row.peers) == (3.0, {"vllm_graph": 3.0}), "the median of the rounds after the warm-up"
    assert rows["Qwen3-0.6B: all batches", "GiB of graphs"].ours == 1.0


def test_the_summary_names_the_worst_case():
    rows = vllm.rows_of([sample("ours", 6.0), sample("vllm_triton", 3.0)])
    assert vllm.summary(rows) == "attention to vllm_triton, ms a step: 0.500x in the mean, 0.500x at Qwen3-8B: batch 5"


def test_the_sizes_that_are_raced_pad_under_5_percent_of_all_steps_and_cost_fewer_captures_than_vllms():
    sizes = vllm.fitted_sizes()
    decode, mixed = vllm.traffic()
    stock = graphs.stock_sizes(vllm.MAX_NUM_SEQS)
    served = Counter({tokens: steps for tokens, steps in mixed.items() if tokens <= sizes[-1]})
    assert sizes[-1] <= vllm.LARGEST_SIZE and served.total() > 0.95 * mixed.total(), "prompts find a graph too"
    assert vllm.MAX_NUM_SEQS in sizes and set(vllm.GRID) <= set(sizes)
    assert graphs.padded_share(decode, sizes) < 0.05 < graphs.padded_share(decode, stock)
    assert graphs.padded_share(decode + served, sizes) < 0.05

    def captures(sizes):  # in pieces, and whole for those that decode steps have
        return len(sizes) + sum(size <= vllm.MAX_NUM_SEQS for size in sizes)

    def captured(sizes):  # in pieces, one a layer and one more
        return QWEN3_8B.num_layers * len(sizes) + captures(sizes)

    assert captures(sizes) < captures(stock) == 54, "an H200 made 54 with vLLM's own sizes"
    assert captured(sizes) < captured(stock) == 1314, "and 1,314 graphs"


def test_compared_engines_are_kept_on_the_same_cores():
    code = "import threading, time; threading.Thread(target=time.sleep, args=(60,)).start(); print(flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        before = os.sched_getaffinity(0)
        pin(process.pid, cores=1)
        threads = [int(path.name) for path in Path(f"/proc/{process.pid}/task").iterdir()]
        found = [os.sched_getaffinity(thread) for thread in threads]
        process.kill()
    assert found == [{max(before)}] * 2 and os.sched_getaffinity(0) == before


def test_a_configuration_is_that_of_the_published_shape(tmp_path):
    config = json.loads((vllm.write_config(QWEN3_8B, tmp_path / "m") / "config.json").read_text())
    assert (config["hidden_size"], config["num_hidden_layers"], config["num_key_value_heads"]) == (4096, 36, 8)


def test_agreement_counts_tokens_up_to_the_first_that_differs():
    assert divergence([[1, 2, 3], [4, 5, 6]], [[1, 2, 3], [4, 0, 6]]) == pytest.approx(4 / 6)


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: no engine can be started")
def test_an_engine_measures_batches_and_leaves_nothing_behind(tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    shape = ModelShape("toy", 2, 4, 2, 64, 2, hidden_size=128, intermediate_size=256, vocab_size=512, max_position=512)
    options = {
        "load_format": "dummy",
        "dtype": "float32",
        "enforce_eager": True,
        "kv_cache_memory_bytes": 2**24,
        "block_size": 32,
        "max_model_len": 256,
    }
    model = vllm.write_config(shape, tmp_path / "model")
    engine = EngineProcess(EngineSpec("toy", str(model), options, probe=False), tmp_path / "toy.log")
    try:
        assert engine.wait()["start_seconds"] > 0
        got = engine.measure(Batch(16, (8, 8, 3)))
        assert [len(ids) for ids in got["token_ids"]] == [8, 8, 3] and got["seconds"] > 0
    finally:
        engine.stop()
    with pytest.raises(ProcessLookupError):
        os.killpg(engine._process.pid, 0)


@pytest.mark.slow
def test_an_engine_that_cannot_start_says_why(tmp_path):
    engine = EngineProcess(EngineSpec("none", str(tmp_path / "absent"), probe=False), tmp_path / "none.log")
    try:
        with pytest.raises(RuntimeError, match="the engine none ended"):
            engine.wait()
    finally:
        engine.stop()


def test_every_run_of_the_factorial_has_a_prefix_of_its_own_that_a_warm_up_does_not_bring_into_the_cache():
    cases = vllm.cases("factorial")
    prefixes = {batch.prompts[0][:2016] for name, batch in cases.items() if name.startswith("run")}
    assert len(prefixes) == 8
    for run in range(8):
        shared = {prompt[:2016] for name in (f"fill {run}", f"run {run}") for prompt in cases[name].prompts}
        assert len(shared) == 1, "the request that fills the cache and those that hit it must share the prefix"
        assert vllm._warm_up(cases[f"run {run}"]).prompts[0][:16] != cases[f"run {run}"].prompts[0][:16]


def test_the_factorial_gives_a_row_for_each_run_and_metric():
    found = [
        {**sample(engine, 5.0, ttft_ms=ttft), "group": "factorial", "case": f"run {run}"}
        for engine, ttft in (("neither", 90.0), ("caching", 20.0))
        for run in range(2)
    ]
    rows = {(row.case, row.unit): row.ours for row in vllm.rows_of(found)}
    assert rows["Qwen3-8B: caching on, graphs off, run 1", "ms TTFT"] == 20.0 and len(rows) == 8


class FakeEngine:
    """An engine that answers at once, dies at its nth batch, or never starts."""

    asked: list[tuple[str, Batch]] = []  # noqa: RUF012  (of all engines, in order)
    stopped: list[str] = []  # noqa: RUF012

    def __init__(self, spec: EngineSpec, log) -> None:
        self.spec = spec

    def wait(self) -> dict:
        if self.spec.name == "vllm_triton":
            raise RuntimeError("the engine vllm_triton ended: out of memory")
        return {"start_seconds": 1.0}

    def pin(self) -> None:
        pass

    def measure(self, batch: Batch) -> dict:
        self.asked.append((self.spec.name, batch))
        if self.spec.name == "ours" and len(batch.outputs) == 16 and batch.outputs[0] > 3:
            raise RuntimeError("the engine ours ended: illegal memory access")
        ids = [[7] * n for n in batch.outputs]
        return {"seconds": 1.0, "step_ms": 5.0, "ttft_ms": 9.0, "tokens": 1, "token_ids": ids, "steps": []}

    def stop(self) -> None:
        self.stopped.append(self.spec.name)


def test_engines_that_fail_are_said_and_the_others_are_measured_on(monkeypatch):
    monkeypatch.setattr(vllm, "EngineProcess", FakeEngine)
    FakeEngine.asked, FakeEngine.stopped, kept = [], [], []
    vllm.measure("8b", kept.append, rounds=2)
    assert sorted(FakeEngine.stopped) == ["fa3", "fitted", "ours", "vllm_triton"], "an engine was left running"
    errors = {(row["engine"], row["case"]): row["error"] for row in kept if "error" in row}
    assert errors.keys() == {("vllm_triton", "start"), ("ours", "batch 16")}
    timed = [row for row in kept if "seconds" in row]
    assert {row["round"] for row in timed} == {1, 2}, "the warm-up round is not kept"
    assert sum(row["engine"] == "fa3" for row in timed) == 2 * len(vllm.cases("8b"))
    assert not any(row["engine"] == "ours" and row["case"] == "batch 32" for row in timed)
    assert vllm.rows_of(kept)


def test_no_case_begins_after_the_time_that_is_given(monkeypatch):
    monkeypatch.setattr(vllm, "EngineProcess", FakeEngine)
    FakeEngine.asked, kept = [], []
    vllm.measure("8b", kept.append, rounds=2, seconds=-1.0)
    assert not FakeEngine.asked and {row["case"] for row in kept} == {"start"}
