"""The plugins inside engines of the installed vLLM, and what can be said of them without one."""

from __future__ import annotations

import asyncio
import json
import operator
import os
import subprocess
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest

from labkit.serve import plugins
from labkit.serve.plugins import limits, policies

needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: no engine can be started")


@pytest.fixture(scope="module")
def engines(tmp_path_factory) -> dict:
    """What engines_child.py found; "folder" holds the records that the first engine left."""
    folder = tmp_path_factory.mktemp("records")
    child = Path(__file__).with_name("engines_child.py")
    done = subprocess.run([sys.executable, child, folder], capture_output=True, text=True, timeout=280)
    line = next((line for line in done.stdout.splitlines() if line.startswith("FOUND ")), None)
    assert line, f"no engine answered:\n{done.stderr[-3000:]}"
    return json.loads(line.removeprefix("FOUND ")) | {"folder": folder, "log": done.stdout + done.stderr}


@needs_vllm
def test_a_policy_decides_who_is_admitted_first(engines):
    assert engines["stock"]["admitted"] == ["5", "9", "20", "33", "48"], "shortest prompts first was asked for"


@needs_vllm
def test_our_kernels_inside_vllm_give_the_tokens_of_its_own_attention(engines):
    assert engines["kernels"]["attention"] == "kernels_attention", f"the gate refused: {engines['log'][-2000:]}"
    assert engines["kernels"]["tokens"] == engines["stock"]["tokens"]


@needs_vllm
def test_a_wrong_attention_is_refused_by_name_and_vllms_own_answers(engines):
    assert engines["wrong"]["impl"] == "LabImpl" and engines["wrong"]["attention"] is None
    assert engines["wrong"]["tokens"] == engines["stock"]["tokens"]
    assert "labkit's attention is not used in model.layers.0.self_attn.attn: decode steps:" in engines["log"]


@needs_vllm
def test_after_inject_none_vllm_has_its_own_backend_back(engines):
    assert engines["again"]["impl"] == "CPUAttentionBackendImpl"
    assert engines["again"]["tokens"] == engines["stock"]["tokens"]


@needs_vllm
def test_a_lowered_limit_holds_in_the_running_engine_and_an_unknown_one_is_refused(engines):
    assert engines["stock"]["most_running"] == 1 and engines["kernels"]["most_running"] == 2
    assert "max_num_seqs: no such limit" in engines["stock"]["refused"]["error"]


@needs_vllm
def test_each_request_leaves_one_row_and_the_steps_give_the_batches_that_decoded(engines):
    from labkit.serve.plugins import records

    rows = records.read(engines["folder"], records.REQUESTS)
    assert sorted(row["prompt_tokens"] for row in rows) == [5, 9, 20, 33, 48]
    assert all(row["output_tokens"] == 3 and 0 < row["decode"] <= row["e2e"] for row in rows)
    steps = records.read(engines["folder"], records.STEPS)
    assert records.decode_batches(steps) == {1: 10}, "five requests one after another, two decode steps each"


def test_vllm_finds_the_plugins_by_name():
    found = {
        entry.name: entry.value
        for group in ("vllm.general_plugins", "vllm.stat_logger_plugins", "vllm.endpoint_plugins")
        for entry in entry_points(group=group)
        if entry.value.startswith("labkit.")
    }
    assert set(found) == {*plugins.PLUGINS, plugins.LIMITS}, "set the environment up again: `make setup`"


def test_plugins_that_are_not_asked_for_change_nothing():
    code = (
        "import sys; from labkit.serve import plugins; plugins.register();"
        "print([m for m in sys.modules if m == 'vllm' or m.startswith('labkit.serve.plugins.')])"
    )
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("LABKIT_", "VLLM_"))}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]", "an unasked plugin imports vLLM, or loads a part"


def test_the_environment_names_all_that_it_switches_on():
    variables = plugins.environment(policy="shortest_job", records="/tmp/r", limits=True)
    assert variables == {
        "LABKIT_POLICY": "shortest_job",
        "LABKIT_RECORDS": "/tmp/r",
        "VLLM_PLUGINS": "labkit,labkit_records,labkit_limits",
    }


def test_a_policy_is_found_by_name_or_by_module_and_function():
    assert policies.policy_named("shortest_prompt")(policies.Waiting("a", 7, 9, 0.0)) == 7
    assert policies.policy_named("operator:neg") is operator.neg
    for wrong, said in (
        ("fastest", "policy: expected one of fcfs"),
        ("", "policy: expected one of fcfs"),
        ("os:", "policy: expected one of fcfs"),
        (None, "policy: expected one of fcfs"),
        ("nomodule:f", "policy: 'nomodule:f' cannot be imported: No module named"),
        ("os:nothing", "policy: 'os:nothing' cannot be imported: .* no attribute 'nothing'"),
        ("os:name", "policy: 'os:name' is no function"),
    ):
        with pytest.raises(ValueError, match=said):
            policies.policy_named(wrong)  # type: ignore[arg-type]


def scheduler() -> SimpleNamespace:
    return SimpleNamespace(
        max_num_active_reqs=8, max_num_scheduled_tokens=64, max_num_running_reqs=8, running=[1], waiting=[2, 3],
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64), kv_cache_manager=SimpleNamespace(usage=0.5),
    )  # fmt: skip


def test_limits_are_set_together_or_not_at_all():
    live = scheduler()
    answer = limits.change(live, {"max_num_active_reqs": 3, "max_num_scheduled_tokens": 16})
    assert answer == {
        "max_num_active_reqs": 3, "max_num_scheduled_tokens": 16, "running": 1, "waiting": 2, "kv_usage": 0.5,
    }  # fmt: skip
    for wrong in (0, 9, 2.5, True, "4"):
        said = limits.change(live, {"max_num_scheduled_tokens": 32, "max_num_active_reqs": wrong})
        assert "max_num_active_reqs: expected a whole number from 1 to 8" in said["error"], wrong
    assert live.max_num_active_reqs == 3 and live.max_num_scheduled_tokens == 16


def test_a_scheduler_without_a_limit_does_not_offer_it():
    live = scheduler()
    del live.max_num_active_reqs
    assert "there are max_num_scheduled_tokens" in limits.change(live, {"max_num_active_reqs": 1})["error"]


def test_bad_bodies_get_a_400_and_never_reach_the_engine():
    async def ask(body: str) -> tuple[int, dict]:
        sent: list[dict] = []

        async def send(message):
            sent.append(message)

        async def read():
            return json.loads(body)

        response = await limits.Limits()._answer(SimpleNamespace(method="POST", json=read))
        await response({}, None, send)
        return sent[0]["status"], json.loads(sent[1]["body"])

    for body in ("[1]", "no json", "3", "[" * 100_000):
        assert asyncio.run(ask(body)) == (400, {"error": "expected a JSON object: limit -> number"}), body[:9]
