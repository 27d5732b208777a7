"""What the repository says about vLLM's graphs and attention follows from the recorded rows."""

import re

import pytest

from labkit.benchmarks import evidence, vllm
from labkit.serve import engines
from tests.test_evidence import quoted

DRAIN = "256 requests, log-normal answers"
WORST = {DRAIN: "256 requests", "16 x 2048 tokens": "16 x 2048"}


@pytest.fixture(scope="module")
def rows():
    """(variant, case, unit) -> row, all of one model."""
    found = evidence.load(evidence.FOLDER / "vllm.nvidia-h200.json").rows
    assert {row.case.split(": ")[0] for row in found} == {"Qwen3-8B"}
    return {(row.variant, row.case.split(": ")[1], row.unit): row for row in found}


def mean_and_worst(rows, variant, unit, peer):
    """Geometric mean, worst ratio, its case, and how many there are."""
    found = {case: row.ratio(peer) for (v, case, u), row in rows.items() if (v, u) == (variant, unit)}
    worst = min(found, key=found.__getitem__)
    return evidence.geometric_mean(list(found.values())), found[worst], worst, len(found)


def said(sentence):
    """The text from `sentence` to the end of its item, and the decimal numbers in it."""
    quoted(sentence)  # says which sentence is missing
    text = " ".join((evidence.FOLDER / "README.md").read_text(encoding="utf-8").split())
    rest = text.split(sentence)[1].split(" - ")[0]
    return rest, [float(n) for n in re.findall(r"\d+\.\d+", rest)]


def mean(values):
    values = list(values)
    return sum(values) / len(values)


def test_no_case_of_the_recorded_group_is_left_out_and_what_is_not_recorded_is_said(rows):
    for variant, peers in (("graphs", {"vllm_graph"}), ("attention", {"vllm_triton", "fa3"})):
        found = {case: row for (v, case, unit), row in rows.items() if (v, unit) == (variant, "tok/s")}
        assert found.keys() == vllm.cases("8b").keys()
        assert all(row.peers.keys() == peers for row in found.values())
    assert engines.recorded_factorial() == {}, "a recorded 2 x 2 is to be described in labkit/evidence/README.md"
    text, _ = said("One round is recorded, so that spreads are 0, and one group of engines:")
    for missing in ("NONE and PIECEWISE", "0.6B", "2 x 2 of prefix caching and graphs"):
        assert missing in text.split("not recorded yet")[0]
    assert all(row.spread == 0 for row in rows.values())


@pytest.mark.parametrize(
    ("title", "variant", "unit", "peer"),
    [
        ("Fitted sizes, throughput to vLLM's own:", "graphs", "tok/s", "vllm_graph"),
        ("Fitted sizes, a step to vLLM's own:", "graphs", "ms a step", "vllm_graph"),
        ("Our attention to vLLM's Triton attention, a step:", "attention", "ms a step", "vllm_triton"),
        ("Our attention to FlashAttention 3, a step:", "attention", "ms a step", "fa3"),
        ("Our attention to vLLM's Triton attention, throughput:", "attention", "tok/s", "vllm_triton"),
        ("Our attention to FlashAttention 3, throughput:", "attention", "tok/s", "fa3"),
    ],
)
def test_the_quoted_ratios_follow_from_the_rows(rows, title, variant, unit, peer):
    average, worst, case, count = mean_and_worst(rows, variant, unit, peer)
    text, _ = said(title)
    expected = f" {average:.3f}x in the mean of {count}, {worst:.3f}x at worst, {WORST.get(case, case)}"
    assert text.startswith(expected), f"labkit/evidence/README.md says:{text}"


@pytest.mark.parametrize(
    ("title", "cases"),
    [
        (
            "Padded rows at batches between vLLM's sizes (3, 6, 12, 27, 44, 77 and 100), in the mean:",
            [f"batch {n}" for n in (3, 6, 12, 27, 44, 77, 100)],
        ),
        ("Padded rows at powers of two, in the mean:", [f"batch {2**n}" for n in range(8)]),
        ("Padded rows of 256 requests with log-normal answers:", [DRAIN]),
    ],
)
def test_the_quoted_shares_of_padded_rows_follow_from_the_rows(rows, title, cases):
    found = [rows["graphs", case, "% padded rows"] for case in cases]
    expected = [mean(row.peers["vllm_graph"] for row in found), mean(row.ours for row in found)]
    assert said(title)[1] == pytest.approx(expected, abs=0.051)


def test_what_capturing_took_follows_from_the_rows(rows):
    fitted, ours = (rows[variant, "all batches", "s of capture"] for variant in ("graphs", "attention"))
    expected = [fitted.peers["vllm_graph"], fitted.ours, ours.peers["vllm_triton"], ours.ours]
    assert said("Capturing, four engines at once:")[1] == pytest.approx(expected, abs=0.051)
    count = rows["graphs", "all batches", "CUDA graphs"]
    text, _ = said("CUDA graphs captured:")
    assert text.startswith(f" {count.peers['vllm_graph']} with vLLM's own sizes, {count.ours} fitted")


def test_what_is_said_of_the_worst_rows_follows_from_the_rows(rows):
    steps = rows["graphs", DRAIN, "% steps without a graph"]
    expected = [steps.peers["vllm_graph"], steps.ours]
    assert said("Steps of those 256 requests without a graph:")[1] == pytest.approx(expected, abs=0.051)
    padded, step = (rows["graphs", "batch 32", unit] for unit in ("% padded rows", "ms a step"))
    shown = (padded.ours, step.ours, padded.peers["vllm_graph"], step.peers["vllm_graph"])
    expected = " {:.1f} % of padded rows take {:.3f} ms a step, and {:.1f} % take {:.3f} ms.".format(*shown)
    assert said("At batch 32,")[0].startswith(expected)
    first = rows["attention", "batch 1", "ms TTFT"]
    text, _ = said("The first token of a single prompt of 128, one step,")
    shown = (first.ours, first.peers["vllm_triton"], first.peers["fa3"])
    assert "takes {:.1f} ms with ours, {:.1f} ms with Triton, {:.1f} ms with".format(*shown) in text
    graphs = rows["attention", DRAIN, "% steps without a graph"]
    assert graphs.ours == graphs.peers["fa3"] and f"({graphs.ours:.1f} %)" in text
    speed = rows["attention", DRAIN, "tok/s"]
    shown = (speed.ours, speed.peers["vllm_triton"], speed.peers["fa3"])
    assert "at {:.0f}, {:.0f} and {:.0f} tokens a second".format(*shown) in text
    assert all(row.ratio("fa3") > 1 for (v, _, unit), row in rows.items() if (v, unit) == ("attention", "ms a step"))


def test_all_tokens_agree_in_every_case(rows):
    found = [row for (_, _, unit), row in rows.items() if unit == "% tokens as fa3"]
    shares = [min(row.ours for row in found), min(row.peers["vllm_triton"] for row in found)]
    assert len(found) == len(vllm.cases("8b")) and quoted("Tokens as with FlashAttention 3:")[:2] == shares


def test_the_table_of_the_readme_follows_from_the_rows(rows):
    text = (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    for line, variant, unit, peer in (
        ("its Triton attention |", "attention", "ms a step", "vllm_triton"),
        ("its FlashAttention 3 |", "attention", "ms a step", "fa3"),
        ("its own graph sizes |", "graphs", "tok/s", "vllm_graph"),
    ):
        [found] = [row for row in text.splitlines() if row.startswith("|") and line in row]
        average, worst, case, _ = mean_and_worst(rows, variant, unit, peer)
        expected = f"{line} {average:.3f}x | {worst:.3f}x, {WORST.get(case, case)} |"
        assert found.endswith(expected), f"README says: {found}"
    said_there = " ".join(text.split())
    for peer, name in (("vllm_triton", "of its Triton attention"), ("fa3", "of FlashAttention 3")):
        worst = mean_and_worst(rows, "attention", "tok/s", peer)[1]
        assert f"{worst:.3f}x {name}" in said_there
