"""What the repository says about vLLM's graphs and attention follows from the recorded rows."""

import re

import pytest

from labkit.benchmarks import evidence, vllm
from labkit.serve import engines
from tests.test_evidence import quoted

DRAIN = "256 requests, log-normal answers"
SHORT = {"16 x 2048 tokens": "16 x 2048"}
MODELS = {"8B": "Qwen3-8B", "0.6B": "Qwen3-0.6B"}
SUMS = "arithmetic model"


@pytest.fixture(scope="module")
def rows():
    """(model, variant, case, unit) -> row."""
    found = evidence.load(evidence.FOLDER / "vllm.nvidia-h200.json").rows
    return {(*row.case.split(": ")[:1], row.variant, row.case.split(": ")[1], row.unit): row for row in found}


def mean_and_worst(rows, model, variant, unit, peer):
    """Geometric mean, worst ratio, its case, and how many there are."""
    found = {
        case: row.ratio(peer)
        for (m, v, case, u), row in rows.items()
        if (m, v, u) == (model, variant, unit) and peer in row.peers and case != "all batches"
    }
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


def test_no_case_that_is_compared_is_left_out_and_what_is_not_recorded_is_said(rows):
    for group, model in (("8b", "Qwen3-8B"), ("0.6b", "Qwen3-0.6B")):
        for variant, peers in (("graphs", {"vllm_graph"}), ("attention", {"vllm_triton", "fa3"})):
            found = {c: row for (m, v, c, unit), row in rows.items() if (m, v, unit) == (model, variant, "tok/s")}
            assert found.keys() == vllm.cases(group).keys()
            assert all(row.peers.keys() >= peers for row in found.values())
            modes = [row for row in found.values() if "vllm_eager" in row.peers and "vllm_piecewise" in row.peers]
            assert variant == "attention" or len(modes) >= len(vllm.GRID)
    assert (SUMS, "attention", "1000 sums", "% tokens as fa3") in rows
    assert engines.recorded_factorial() == {}, "a recorded 2 x 2 is to be described in labkit/evidence/README.md"
    assert said("The 2 x 2 of prefix caching and graphs")[0].startswith(" is not recorded yet.")


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("title", "variant", "unit", "peer"),
    [
        ("fitted sizes, throughput to vLLM's own:", "graphs", "tok/s", "vllm_graph"),
        ("fitted sizes, a step to vLLM's own:", "graphs", "ms a step", "vllm_graph"),
        ("fitted sizes, throughput to pieces only:", "graphs", "tok/s", "vllm_piecewise"),
        ("fitted sizes, throughput to no graphs:", "graphs", "tok/s", "vllm_eager"),
        ("our attention, a step to vLLM's Triton attention:", "attention", "ms a step", "vllm_triton"),
        ("our attention, a step to FlashAttention 3:", "attention", "ms a step", "fa3"),
        ("our attention, throughput to vLLM's Triton attention:", "attention", "tok/s", "vllm_triton"),
        ("our attention, throughput to FlashAttention 3:", "attention", "tok/s", "fa3"),
    ],
)
def test_the_quoted_ratios_follow_from_the_rows(rows, name, title, variant, unit, peer):
    average, worst, case, count = mean_and_worst(rows, MODELS[name], variant, unit, peer)
    text, _ = said(f"{name}, {title}")
    expected = f" {average:.3f}x in the mean of {count}, {worst:.3f}x at worst, {SHORT.get(case, case)}."
    assert text.startswith(expected), f"labkit/evidence/README.md says:{text}"


@pytest.mark.parametrize("name", MODELS)
def test_the_quoted_spreads_follow_from_the_rows(rows, name):
    found = sorted(row.spread for (m, _, _, unit), row in rows.items() if (m, unit) == (MODELS[name], "tok/s"))
    expected = [100 * found[len(found) // 2], 100 * found[-1]]
    assert said(f"{name}, spread of throughput over the rounds:")[1] == pytest.approx(expected, abs=0.051)


@pytest.mark.parametrize(
    ("title", "cases"),
    [
        (
            "Padded rows at batches between vLLM's sizes (3, 6, 12, 27, 44, 77 and 100), in the mean:",
            [f"batch {n}" for n in vllm.BETWEEN],
        ),
        ("Padded rows at powers of two, in the mean:", [f"batch {n}" for n in vllm.GRID]),
        ("Padded rows of 256 requests with log-normal answers:", [DRAIN]),
    ],
)
def test_the_quoted_shares_of_padded_rows_follow_from_the_rows(rows, title, cases):
    found = [rows["Qwen3-8B", "graphs", case, "% padded rows"] for case in cases]
    expected = [mean(row.peers["vllm_graph"] for row in found), mean(row.ours for row in found)]
    assert said(title)[1] == pytest.approx(expected, abs=0.051)


def test_what_capturing_took_follows_from_the_rows(rows):
    fitted, ours = (rows["Qwen3-8B", variant, "all batches", "s of capture"] for variant in ("graphs", "attention"))
    expected = [fitted.peers["vllm_graph"], fitted.ours, ours.peers["vllm_triton"], ours.ours]
    assert said("Capturing, four engines at once:")[1] == pytest.approx(expected, abs=0.051)
    count = rows["Qwen3-8B", "graphs", "all batches", "CUDA graphs"]
    text, _ = said("CUDA graphs captured:")
    assert text.startswith(f" {count.peers['vllm_graph']} with vLLM's own sizes, {count.ours} fitted")


def test_what_is_said_of_the_worst_rows_follows_from_the_rows(rows):
    steps = rows["Qwen3-8B", "graphs", DRAIN, "% steps without a graph"]
    expected = [steps.peers["vllm_graph"], steps.ours]
    assert said("Steps of those 256 requests without a graph:")[1] == pytest.approx(expected, abs=0.051)
    assert (
        steps.ours < steps.peers["vllm_graph"] / 2
        and "more than half of those without a graph got one" in (said("Fitting pays where prompts join decodes:")[0])
    )
    padded, step = (rows["Qwen3-8B", "graphs", "batch 32", unit] for unit in ("% padded rows", "ms a step"))
    shown = (padded.ours, step.ours, padded.peers["vllm_graph"], step.peers["vllm_graph"])
    expected = " {:.1f} % of padded rows take {:.3f} ms a step, and {:.1f} % take {:.3f} ms.".format(*shown)
    assert said("At batch 32,")[0].startswith(expected)
    first = rows["Qwen3-8B", "attention", "batch 1", "ms TTFT"]
    text, _ = said("The first token of a single prompt of 128, one step,")
    shown = (first.ours, first.peers["vllm_triton"], first.peers["fa3"])
    assert "takes {:.1f} ms with ours, {:.1f} ms with Triton, {:.1f} ms with".format(*shown) in text
    lost = {
        case
        for (m, v, case, unit), row in rows.items()
        if (m, v, unit) == ("Qwen3-8B", "attention", "tok/s") and row.ratio("fa3") < 0.999
    }
    assert lost == {DRAIN, "16 x 2048 tokens"}, "said to be the only ones where ours loses to FlashAttention 3"
    host_bound = [
        row.ours
        for (m, _, case, unit), row in rows.items()
        if (m, unit) == ("Qwen3-0.6B", "ms a step") and case in ("batch 1", "batch 8", "batch 27")
    ]
    assert all(1.5 < ms < 3 for ms in host_bound), "said to be about 2 ms"


def test_all_tokens_agree_in_every_case(rows):
    found = [row for (*_, unit), row in rows.items() if unit == "% tokens as fa3"]
    shares = [min(row.ours for row in found), min(row.peers["vllm_triton"] for row in found)]
    text, numbers = said("Tokens as with FlashAttention 3:")
    assert numbers == shares and f"in the worst of {len(found)} cases" in text


def test_the_table_of_the_readme_follows_from_the_rows(rows):
    text = (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    for line, variant, unit, peer in (
        ("its Triton attention |", "attention", "ms a step", "vllm_triton"),
        ("its FlashAttention 3 |", "attention", "ms a step", "fa3"),
        ("its own graph sizes |", "graphs", "tok/s", "vllm_graph"),
    ):
        [found] = [row for row in text.splitlines() if row.startswith("|") and line in row]
        average, worst, case, _ = mean_and_worst(rows, "Qwen3-8B", variant, unit, peer)
        expected = f"{line} {average:.3f}x | {worst:.3f}x, {SHORT.get(case, case)} |"
        assert found.endswith(expected), f"README says: {found}"
    drain = rows["Qwen3-8B", "attention", DRAIN, "tok/s"]
    ratios = f"throughput {drain.ratio('vllm_triton'):.3f}x of its Triton attention, {drain.ratio('fa3'):.3f}x of"
    assert ratios in " ".join(text.split())
