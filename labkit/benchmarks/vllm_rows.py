"""Evidence rows of the vLLM benchmark: what its samples come to."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from labkit.benchmarks.evidence import Row, geometric_mean, ratios

NAMES = {"8b": "Qwen3-8B", "8b-modes": "Qwen3-8B", "factorial": "Qwen3-8B", "0.6b": "Qwen3-0.6B",
         "0.6b-modes": "Qwen3-0.6B", "tokens": "arithmetic model"}  # fmt: skip
VARIANTS: dict[str, tuple[str, dict[str, str]]] = {
    "graphs": ("fitted", {"vllm_graph": "fa3"}),
    "attention": ("ours", {"vllm_triton": "vllm_triton", "fa3": "fa3"}),
    "modes": ("fitted", {"vllm_piecewise": "vllm_piecewise", "vllm_eager": "vllm_eager"}),
}
"""variant -> our engine, and peer -> its engine. `modes` are of the groups of that name, the others of the rest."""
Samples = dict[tuple[str, str, str], list[Mapping[str, Any]]]
"""(model, case, engine) -> its samples."""
OF_ALL_BATCHES = ("start", "capture")


def rows_of(samples: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Evidence rows of what `measure` kept; samples of engines that did not start are left out."""
    good = [sample for sample in samples if "error" not in sample]
    modes = _by_engine(sample for sample in good if sample["group"].endswith("-modes"))
    kept = _by_engine(sample for sample in good if not sample["group"].endswith("-modes"))
    rows = [*_compared(kept, "graphs"), *_compared(kept, "attention"), *_compared(modes, "modes")]
    return rows + list(_again(kept)) + list(_agreement(kept)) + list(_factorial(kept))


def _by_engine(samples: Iterable[Mapping[str, Any]]) -> Samples:
    found: Samples = {}
    for sample in samples:
        found.setdefault((NAMES[sample["group"]], sample["case"], sample["engine"]), []).append(sample)
    return found


def _compared(kept: Samples, variant: str) -> Iterator[Row]:
    """Rows of our engine beside its peers, one for each case and unit."""
    own, peers = VARIANTS[variant]
    figures = {key: _figures(key[1], found) for key, found in kept.items()}
    for model, case in dict.fromkeys((model, case) for model, case, _ in figures):
        for (unit, better), (value, spread) in figures.get((model, case, own), {}).items():
            others = {peer: figures.get((model, case, name), {}).get((unit, better)) for peer, name in peers.items()}
            beside = {peer: round(found[0], 4) for peer, found in others.items() if found}
            label = f"{model}: {'all batches' if case in OF_ALL_BATCHES else case}"
            yield Row(label, unit, better, round(value, 4), beside, round(spread, 4), variant)


def _figures(case: str, samples: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], tuple[float, float]]:
    """(unit, better) -> median and spread of one engine in one case.

    What starting took is no row: engines that start side by side take time from each other.
    """
    if case == "capture":
        found = {
            ("s of capture", "lower"): [sample["capture_seconds"] for sample in samples],
            ("GiB of graphs", "lower"): [sample["capture_bytes"] / 2**30 for sample in samples],
        }
    elif case == "start":
        captured = [sample for sample in samples if sample.get("shapes")][:1]  # none without graphs
        found = {
            ("shapes captured", "lower"): [sample["shapes"] for sample in captured],  # in each mode that has it
            ("CUDA graphs", "lower"): [sample["graphs"] for sample in captured],  # piecewise, one a layer
        }
    else:
        timed = [sample for sample in samples if "seconds" in sample]
        found = {
            ("ms a step", "lower"): [sample["step_ms"] for sample in timed if sample["step_ms"]],
            ("tok/s", "higher"): [sample["tokens"] / sample["seconds"] for sample in timed],
            ("ms TTFT", "lower"): [sample["ttft_ms"] for sample in timed if sample.get("ttft_ms")],
            ("% steps without a graph", "lower"): [100 * _without_graph(sample) for sample in timed if sample["steps"]],
            ("% padded rows", "lower"): [100 * share for sample in timed if (share := _padded(sample)) is not None],
        }
    return {key: (statistics.median(values), _spread(values, key[0])) for key, values in found.items() if values}


def _padded(sample: Mapping[str, Any]) -> float | None:
    """Share of the rows in replayed graphs that belonged to no request; None where none was replayed."""
    replayed = [step for step in sample["steps"] if step[0] != "NONE"]
    computed = sum(count * padded for _, _, padded, count in replayed)
    return 1 - sum(count * tokens for _, tokens, _, count in replayed) / computed if computed else None


def _without_graph(sample: Mapping[str, Any]) -> float:
    """Share of the steps that no graph was replayed for."""
    counts = [(mode, count) for mode, _, _, count in sample["steps"]]
    return sum(count for mode, count in counts if mode == "NONE") / sum(count for _, count in counts)


def _spread(values: Sequence[float], unit: str) -> float:
    """Range over median: two or three rounds have no quartiles. Of a share, range over 100 %: its median may be 0."""
    if unit.startswith("%"):
        return (max(values) - min(values)) / 100
    return (max(values) - min(values)) / median if (median := statistics.median(values)) else 0.0


def _again(kept: Samples) -> Iterator[Row]:
    """An engine beside itself, started once more with the same settings: what two engines may differ by, by chance."""
    for (model, case, engine), samples in kept.items():
        timed = [sample for sample in samples if "seconds" in sample]
        first, second = ([sample for sample in timed if sample.get("started", 0) == n] for n in (0, 1))
        if engine == "fa3" and first and second:
            (was, _), (value, spread) = (_figures(case, found)["tok/s", "higher"] for found in (first, second))
            yield Row(
                f"{model}: {case}", "tok/s", "higher", round(value, 4), {"first_start": round(was, 4)},
                round(spread, 4), "again",
            )  # fmt: skip


def _agreement(kept: Samples) -> Iterator[Row]:
    """How far each engine's tokens agree with FlashAttention 3's; two of vLLM's own show what rounding does."""
    for (model, case, engine), samples in kept.items():
        shares = [sample["agreed"] for sample in samples if "agreed" in sample]
        if engine == "fa3" and shares and "ours" in shares[0]:
            ours, triton = (
                [100 * share[name] for share in shares if name in share] for name in ("ours", "vllm_triton")
            )
            beside = {"vllm_triton": round(statistics.median(triton), 3)} if triton else {}
            value = round(statistics.median(ours), 3)
            yield Row(
                f"{model}: {case}",
                "% tokens as fa3",
                "higher",
                value,
                beside,
                round(_spread(ours, "%"), 4),
                "attention",
            )


def _factorial(kept: Samples) -> Iterator[Row]:
    """One row for each run of each cell of prefix caching x graphs, beside the other cells of that run."""
    for unit, key in (("ms TTFT", "ttft_ms"), ("ms a token", "step_ms")):
        cells: dict[tuple[str, str], dict[str, list[float]]] = {}
        for (model, case, engine), samples in kept.items():
            values = [sample[key] for sample in samples if sample.get(key)]
            if case.startswith("run ") and values:
                cells.setdefault((model, case), {})[engine] = values
        for (model, case), engines in cells.items():
            medians = {engine: round(statistics.median(values), 3) for engine, values in engines.items()}
            for engine, value in medians.items():
                label = (
                    f"{model}: caching {'on' if engine in ('caching', 'both') else 'off'}, "
                    f"graphs {'on' if engine in ('graphs', 'both') else 'off'}, {case}"
                )
                others = {name: other for name, other in medians.items() if name != engine}
                yield Row(label, unit, "lower", value, others, round(_spread(engines[engine], unit), 4), "factorial")


def summary(rows: list[Row]) -> str:
    """How fitted sizes and our attention stand beside vLLM's own, worst cases included."""
    lines = []
    for variant, unit, peer in (
        ("graphs", "tok/s", "vllm_graph"), ("attention", "ms a step", "vllm_triton"), ("attention", "ms a step", "fa3"),
    ):  # fmt: skip
        found = ratios([row for row in rows if row.variant == variant and row.unit == unit], peer)
        if found:
            worst = min(found, key=lambda case: found[case])
            mean = geometric_mean(list(found.values()))
            lines.append(f"{variant} to {peer}, {unit}: {mean:.3f}x in the mean, {found[worst]:.3f}x at {worst}")
    return "\n".join(lines)
