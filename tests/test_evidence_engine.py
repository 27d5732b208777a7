"""What the repository says about the engine's speed follows from the recorded rows."""

import ast

import pytest

from labkit.benchmarks import engine, evidence
from tests.test_evidence import quoted


@pytest.fixture(scope="module")
def rows():
    return evidence.load(evidence.FOLDER / "engine.nvidia-h200.json").rows


def found(rows, kind, model, peer):
    """Ratios of the batches of a model, in their order."""
    start = f"{kind}: {model}, batch "
    return [row.ratio(peer) for row in rows if row.case.startswith(start) and peer in row.peers]


def test_no_row_and_no_peer_is_left_out(rows):
    cases = [
        f"{kind}: {name}, batch {batch}, 128 + 128 tokens"
        for name, (_, batches) in engine.CASES.items() for batch in batches for kind in ("decode step", "throughput")
    ]  # fmt: skip
    assert [row.case for row in rows] == cases
    assert all({"vllm_graph", "own_eager", "vllm_eager"} <= row.peers.keys() for row in rows)


@pytest.mark.parametrize("model", list(engine.CASES))
@pytest.mark.parametrize(
    "title, kind, peer",
    [
        ("throughput to vLLM with graphs", "throughput", "vllm_graph"),
        ("decode step to vLLM with graphs", "decode step", "vllm_graph"),
        ("decode step to our own without graphs", "decode step", "own_eager"),
    ],
)
def test_the_quoted_ratios_follow_from_the_rows(rows, model, title, kind, peer):
    ratios = found(rows, kind, model, peer)
    assert quoted(f"{model}, {title}:") == pytest.approx([*ratios, min(ratios)], abs=6e-4)


@pytest.mark.parametrize("model", list(engine.CASES))
def test_the_quoted_distance_to_the_floor_follows_from_the_rows(rows, model):
    ratios = [1 / r for r in found(rows, "decode step", model, "byte_floor")]
    assert quoted(f"{model}, decode step over its byte floor:") == pytest.approx([*ratios, max(ratios)], abs=6e-4)


def test_the_table_of_the_readme_follows_from_the_rows(rows):
    text = (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    for model, (_, batches) in engine.CASES.items():
        ratios = found(rows, "throughput", model, "vllm_graph")
        worst = batches[ratios.index(min(ratios))]
        mean = evidence.geometric_mean(ratios)
        line = f"| engine, Qwen3-{model} shape, {' / '.join(map(str, batches))} requests |"
        [said] = [row for row in text.splitlines() if row.startswith(line)]
        assert said == f"{line} vLLM with CUDA graphs | {mean:.3f}x | {min(ratios):.3f}x, batch {worst} |"


def test_the_engine_is_not_slower_than_its_floors(rows):
    assert min(found(rows, "throughput", "8B", "vllm_graph")) >= 0.8
    assert found(rows, "decode step", "0.6B", "own_eager")[0] >= 1.9


def test_lab_4_quotes_vllms_recorded_steps(rows):
    notebook = (evidence.FOLDER.parents[1] / "solutions/lab4_cuda_graphs/lab4_cuda_graphs.nb.py").read_text()
    text = notebook.split("VLLM_STEP_MS = {  # decode step by batch")[1].split("\n}")[0]
    said = ast.literal_eval("{" + text + "}")
    found = {row.case: row.peers for row in rows}
    for name, steps in said.items():
        shape, how = name.removeprefix("Qwen3-").split(", ")
        for batch, step_ms in steps.items():
            peers = found[f"decode step: {shape}, batch {batch}, 128 + 128 tokens"]
            assert step_ms == pytest.approx(peers[{"graphs": "vllm_graph", "eager": "vllm_eager"}[how]], rel=5e-3)
