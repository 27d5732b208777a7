"""Recorded GPU runs, drawn: what a student without that GPU looks at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from labkit.plots.style import FAINT, INK, MARKERS, colour, figure

FOLDER = Path(__file__).resolve().parents[1] / "evidence"
PEER_NAMES = {
    "fa2": "FlashAttention 2", "fa3": "FlashAttention 3", "cudnn": "cuDNN", "flex": "FlexAttention",
    "fa3_paged": "FlashAttention 3, paged", "vllm_triton": "vLLM's Triton kernel", "sdpa_gather": "gather, then SDPA",
    "marlin": "Marlin", "machete": "Machete", "bf16": "bf16 matmul", "vllm_graph": "vLLM with graphs",
    "vllm_eager": "vLLM, eager", "own_eager": "ours, eager", "own_bf16": "ours in bf16",
    "torch_eager": "torch, eager", "torch_compile": "torch.compile",
}  # fmt: skip


def evidence_chart(
    benchmark: str, gpu: str | None = None, most: int = 24, *, variant: str | None = None, unit: str | None = None
) -> Figure:
    """How ours compares with each peer in each case of a recorded run, the worst case on top.

    gpu: a part of the file's GPU name, where several runs are recorded. A dot right of the line means that ours is
    better. At most `most` cases are drawn, the worst ones; the title says how many there are. variant, unit: only rows
    of these. Where no such run is recorded, the figure says so.
    """
    found = sorted(FOLDER.glob(f"{benchmark}.*.json"))
    runs = [p for p in found if gpu is None or gpu.lower() in p.name.lower()]
    if not runs:
        return _nothing(benchmark, [p.name for p in sorted(FOLDER.glob("*.json"))])
    run = json.loads(runs[0].read_text(encoding="utf-8"))
    run["rows"] = [r for r in run["rows"] if variant in (None, r.get("variant")) and unit in (None, r["unit"])]
    return _chart(run, most, f", {unit}" if unit else "")


def advantages(row: dict[str, Any]) -> dict[str, float]:
    """peer -> how many times as good as that peer ours is in this row; above 1 is better, whatever the unit.

    Ceilings and variants of our own that a run records beside the peers are none, and a share (of padded rows, say) is
    no speed: it gives {}.
    """
    if row["unit"].startswith("%"):
        return {}
    peers = {name: value for name, value in row["peers"].items() if value and name in PEER_NAMES}
    return {n: row["ours"] / v if row["better"] == "higher" else v / row["ours"] for n, v in peers.items()}


def _chart(run: dict[str, Any], most: int, what: str) -> Figure:
    rows = [row for row in run["rows"] if advantages(row)]
    if not rows:
        return _nothing(run["benchmark"], [])
    worst = sorted(rows, key=lambda row: min(advantages(row).values()))[:most]
    several = len({row.get("variant") for row in rows}) > 1
    peers = list(dict.fromkeys(name for row in rows for name in advantages(row)))
    with figure(8.6, 0.24 * len(worst) + 1.7) as (made, axes):
        for at, row in enumerate(worst):
            values = advantages(row)
            axes.plot([1, *values.values()], [at] * (len(values) + 1), color="#DDDDDD", linewidth=1, zorder=1)
            for name, value in values.items():
                number = peers.index(name)
                axes.plot(value, at, linestyle="none", marker=MARKERS[number % len(MARKERS)], color=colour(number),
                          markersize=6.5, zorder=2)  # fmt: skip
        for number, name in enumerate(peers):
            axes.plot([], [], linestyle="none", marker=MARKERS[number % len(MARKERS)], color=colour(number),
                      label=PEER_NAMES.get(name, name))  # fmt: skip
        axes.axvline(1, color=INK, linewidth=1)
        axes.set_xscale("log")
        _ratio_ticks(axes)
        axes.set_yticks(range(len(worst)), [_label(row, several) for row in worst], fontsize=8)
        axes.set(ylim=(len(worst) - 0.4, -0.6), xlabel="how many times as fast as the peer")
        shown = f"the {len(worst)} worst of {len(rows)} cases" if len(worst) < len(rows) else f"{len(rows)} cases"
        made.suptitle(f"{run['benchmark']} on {run['gpu']}{what}: {shown}", fontsize=11, fontweight="bold")
        made.legend(loc="outside lower center", ncols=min(len(peers), 4), fontsize=9)
    return made


def _label(row: dict[str, Any], with_variant: bool) -> str:
    return f"{row['case']} ({row['variant']})" if with_variant and "variant" in row else row["case"]


def _ratio_ticks(axes: Any) -> None:
    """A round number about every sixth of the axis, so that their labels stand apart."""
    low, high = axes.get_xlim()
    step = (high / low) ** (1 / 6)
    ticks = [1.0]
    for candidate in (1.2, 1.5, 2, 3, 5, 7, 10, 15, 20, 30, 50, 100):
        if candidate <= high and candidate >= max(ticks) * step:
            ticks.append(candidate)
    for candidate in (0.95, 0.85, 0.7, 0.5, 0.3, 0.2, 0.1):
        if candidate >= low and candidate <= min(ticks) / step:
            ticks.append(candidate)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")


def _nothing(benchmark: str, others: list[str]) -> Figure:
    with figure(8.0, 1.4) as (made, axes):
        axes.axis("off")
        there = f"; recorded are: {', '.join(others)}" if others else ""
        axes.text(0, 0.5, f"no run of '{benchmark}' is recorded in labkit/evidence{there}", color=FAINT, va="center")
    return made
