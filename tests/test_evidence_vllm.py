"""What the repository says about vLLM's graphs and attention follows from the recorded rows."""

import re

import pytest

from labkit.benchmarks import evidence, vllm
from labkit.serve import engines, graphs
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
        modes = [row for (m, v, _, unit), row in rows.items() if (m, v, unit) == (model, "modes", "tok/s")]
        assert len(modes) >= len(vllm.GRID) and all(
            row.peers.keys() == {"vllm_eager", "vllm_piecewise"} for row in modes
        )
    assert (SUMS, "attention", "1000 sums", "% tokens as fa3") in rows
    assert {unit: set(map(len, cells.values())) for unit, cells in engines.recorded_factorial().items()} == {
        "ms TTFT": {8}, "ms a token": {8},
    }  # fmt: skip


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("title", "variant", "unit", "peer"),
    [
        ("fitted sizes, throughput to vLLM's own:", "graphs", "tok/s", "vllm_graph"),
        ("fitted sizes, a step to vLLM's own:", "graphs", "ms a step", "vllm_graph"),
        ("fitted sizes, throughput to pieces only:", "modes", "tok/s", "vllm_piecewise"),
        ("fitted sizes, throughput to no graphs:", "modes", "tok/s", "vllm_eager"),
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


def test_the_engine_that_was_started_again_shows_what_chance_does(rows):
    average, worst, case, count = mean_and_worst(rows, "Qwen3-8B", "again", "tok/s", "first_start")
    text, _ = said("8B, vLLM with its own sizes, started again with nothing changed, throughput to itself:")
    assert text.startswith(f" {average:.3f}x in the mean of {count}, {worst:.3f}x at worst, {case}.")
    single = [
        row.ratio("first_start")
        for (_, variant, case, _), row in rows.items()
        if variant == "again" and case != DRAIN
    ]  # fmt: skip
    assert said("its single batches went at")[1] == pytest.approx([min(single), max(single)], abs=5.1e-4)


def test_what_capturing_took_follows_from_the_rows(rows):
    times = [rows[model, "graphs", "all batches", "s of capture"] for model in ("Qwen3-8B", "Qwen3-0.6B")]
    large, small = (f"{row.peers['vllm_graph']:.2f} s with vLLM's own sizes, {row.ours:.2f} s fitted" for row in times)
    assert said("Capturing, one engine at a time:")[0].startswith(f" at 8B {large}; at 0.6B {small}.")
    assert f"by up to {100 * max(row.spread for row in times):.0f} %" in said("Captures are fewer than")[0]
    assert times[0].ours < times[0].peers["vllm_graph"] and times[1].ours > times[1].peers["vllm_graph"]
    shapes, graphs = (rows["Qwen3-8B", "graphs", "all batches", unit] for unit in ("shapes captured", "CUDA graphs"))
    text, _ = said("Captures:")
    assert text.startswith(f" {shapes.peers['vllm_graph']} with vLLM's own sizes, {shapes.ours} fitted.")
    assert f"{graphs.peers['vllm_graph']} with vLLM's own sizes, {graphs.ours} fitted" in text.split("CUDA graphs")[1]
    fewer = shapes.peers["vllm_graph"] - shapes.ours
    assert said("Captures are fewer than")[0].startswith(f" with vLLM's own sizes by {fewer},")
    memory = rows["Qwen3-8B", "graphs", "all batches", "GiB of graphs"]
    assert said("Memory of the graphs, 8B:")[1] == pytest.approx([memory.peers["vllm_graph"], memory.ours], abs=0.0051)


def test_the_2_x_2_is_said_as_it_was_recorded():
    for title, unit in (("time to the first token", "ms TTFT"), ("time between tokens", "ms a token")):
        cells = engines.recorded_factorial()[unit]
        expected = [mean(cells[cell]) for cell in ((False, False), (False, True), (True, False), (True, True))]
        assert said(f"The 2 x 2, {title}:")[1] == pytest.approx(expected, abs=0.051)
    assert max(cells[False, True]) < min(cells[True, False]), "between tokens graphs alone count"


def test_lab_5_asks_about_the_2_x_2_as_it_was_recorded():
    first = {cell: evidence.geometric_mean(times) for cell, times in engines.recorded_factorial()["ms TTFT"].items()}
    assert 0.9 < first[False, True] / first[False, False] < 1.1, "graphs leave the time to first token alone"
    assert first[True, True] / first[True, False] < 1 / 3, "and cut it to less than a third once caching is on"
    between = {
        cell: evidence.geometric_mean(times) for cell, times in engines.recorded_factorial()["ms a token"].items()
    }
    assert all(0.9 < between[True, on] / between[False, on] < 1.1 for on in (False, True))
    assert graphs.stock_sizes(vllm.MAX_NUM_SEQS)[-1] == 256


def test_what_is_said_of_the_worst_rows_follows_from_the_rows(rows):
    steps = rows["Qwen3-8B", "graphs", DRAIN, "% steps without a graph"]
    expected = [steps.peers["vllm_graph"], steps.ours]
    assert said("Steps of those 256 requests without a graph:")[1] == pytest.approx(expected, abs=0.051)
    assert (
        steps.ours < steps.peers["vllm_graph"] / 2
        and "more than half of those without a graph got one" in (said("Fitting pays where prompts join decodes:")[0])
    )
    assert mean_and_worst(rows, "Qwen3-8B", "graphs", "tok/s", "vllm_graph")[2] == "batch 128"
    padded = {f"batch {n}": rows["Qwen3-8B", "graphs", f"batch {n}", "% padded rows"].ours for n in vllm.BETWEEN}
    worst = max(padded, key=padded.__getitem__)
    assert said("Batches between the fitted sizes stay padded,")[0].startswith(
        f" by up to {padded[worst]:.1f} %, {worst},"
    )
    first = rows["Qwen3-8B", "attention", "batch 1", "ms TTFT"]
    text, _ = said("The first token of a single prompt of 128, one step,")
    shown = (first.ours, first.peers["vllm_triton"], first.peers["fa3"])
    assert "takes {:.1f} ms with ours, {:.1f} ms with Triton, {:.1f} ms with".format(*shown) in text
    host_bound = [
        row.ours
        for (m, v, case, unit), row in rows.items()
        if (m, unit) == ("Qwen3-0.6B", "ms a step") and v != "modes" and case in ("batch 1", "batch 8", "batch 27")
    ]
    assert all(1.3 < ms < 3 for ms in host_bound), "said to be about 2 ms"


def test_where_our_attention_loses_is_said(rows):
    def losing(unit, peer):
        found = {c: row for (m, v, c, u), row in rows.items() if (m, v, u) == ("Qwen3-8B", "attention", unit)}
        return {case: row.ratio(peer) for case, row in found.items() if row.ratio(peer) < 0.9995}

    slower = losing("ms a step", "vllm_triton")
    assert slower.keys() == {f"batch {n}" for n in (1, 2, 3, 4, 6, 27, 32, 44, 64)}, "batches up to 6 and from 27 to 64"
    longer = [rows["Qwen3-8B", "attention", case, "ms a step"] for case in slower]
    text, _ = said("Ours takes up to")
    assert text.startswith(f" {max(row.ours - row.peers['vllm_triton'] for row in longer):.2f} ms a step longer")
    lost = losing("tok/s", "vllm_triton")
    assert f"In throughput batches 1, 2 and 64 lose, {min(lost.values()):.3f}x at worst" in text
    assert lost.keys() == {"batch 1", "batch 2", "batch 64"}
    lost = losing("tok/s", "fa3")
    assert lost.keys() == {"16 x 2048 tokens"}
    assert said("To FlashAttention 3 ours loses with 16 x 2048 alone,")[0].startswith(
        f" {lost['16 x 2048 tokens']:.3f}x."
    )


def test_vllms_steps_at_0_6b_are_compared_with_our_engines_in_both_runs(rows):
    held = [rows["Qwen3-0.6B", "graphs", f"batch {n}", "ms a step"].peers["vllm_graph"] for n in (1, 16, 64)]
    ours = {row.case: row.ours for row in evidence.load(evidence.FOLDER / "engine.nvidia-h200.json").rows}
    steps = [ours[f"decode step: 0.6B, batch {n}, 128 + 128 tokens"] for n in (1, 16, 64)]
    assert said("Held to four cores, as in the section on vLLM below, it took")[1] == pytest.approx(
        [*held, *(theirs / own for theirs, own in zip(held, steps, strict=True))], abs=0.0051
    )


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
    assert ratios in " ".join(text.split()) and f"rounds it differs by up to {100 * drain.spread:.0f} %" in text
