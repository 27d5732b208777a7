"""The steps of a server in time: who is in which, what is padded, and what a graph replays."""

from __future__ import annotations

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.plots.style import FAINT, INK, STYLE, colour
from labkit.simulate.replay import Replay, Shown

PREFILL, DECODE, GRAPH, EAGER = colour(1), colour(0), colour(2), colour(3)


def step_timeline(result: Replay, name: str = "") -> Figure:
    """Requests as lanes over time, and below them each step's padded rows and how it was launched.

    result: recorded (`replay(..., record=True)`). name: the policy's. ValueError if no steps were recorded.
    """
    if not result.steps:
        raise ValueError("result holds no steps: replay with record=True")
    lanes = len(result.served)
    most = max(1, max(step.padded for step in result.steps))
    with plt.rc_context(STYLE):
        made, (top, middle, bottom) = plt.subplots(
            3, 1, figsize=(9.4, 0.27 * lanes + 2.5), layout="constrained", sharex=True,
            height_ratios=[0.27 * lanes, 0.16 * most + 0.25, 0.3],
        )  # fmt: skip
        _draw_lanes(top, result)
        _draw_padding(middle, result.steps, most)
        _draw_launches(bottom, result.steps)
        waits = f"mean latency {1e3 * result.mean:,.0f} ms, P99 {1e3 * result.percentile(99):,.0f} ms"
        top.set_title(f"{name + ': ' if name else ''}{waits}, longest wait {1e3 * result.longest_wait:,.0f} ms")
        made.legend(handles=_legend(), loc="outside lower left", ncols=6, fontsize=9)
    return made


def _draw_lanes(axes: Axes, result: Replay) -> None:
    for lane, served in enumerate(result.served):
        axes.plot(
            [1e3 * served.ticket.arrival, 1e3 * served.finished], [lane, lane], color="#C9C9C9", linewidth=2, zorder=1
        )
        axes.plot(1e3 * served.ticket.arrival, lane, marker="|", color=INK, markersize=8, zorder=2)
    lane_of = {served.ticket.id: lane for lane, served in enumerate(result.served)}
    for face, ids in ((PREFILL, "prefill"), (DECODE, "decode")):
        bars: dict[int, list[tuple[float, float]]] = {}
        for step in result.steps:
            for number in getattr(step, ids):
                bars.setdefault(number, []).append(_span(step))
        for number, spans in bars.items():
            axes.broken_barh(spans, (lane_of[number] - 0.38, 0.76), facecolor=face, edgecolor="white", linewidth=0.4)
    labels = [f"{s.ticket.id}: {s.ticket.prompt_len} in, {s.ticket.output_len} out" for s in result.served]
    axes.set_yticks(range(len(labels)), labels, fontsize=8.5)
    axes.set(ylim=(len(labels) - 0.4, -0.6))
    axes.grid(visible=False, axis="y")
    axes.tick_params(axis="y", length=0)


def _draw_padding(axes: Axes, steps: list[Shown], most: int) -> None:
    for row in range(most):
        spans = [_span(step) for step in steps if step.padded > row]
        axes.broken_barh(spans, (row, 1), facecolor="white", edgecolor=FAINT, hatch="/////", linewidth=0.6)
    axes.set(ylim=(0, most), yticks=[0.5 * most], yticklabels=["padded rows"])
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def _draw_launches(axes: Axes, steps: list[Shown]) -> None:
    for graph, face, hatch in ((True, GRAPH, ""), (False, EAGER, "xxx")):
        spans = [_span(step) for step in steps if step.graph == graph]
        axes.broken_barh(spans, (0, 1), facecolor=face, edgecolor="white", hatch=hatch, linewidth=0.4)
    axes.set(ylim=(0, 1), yticks=[0.5], yticklabels=["graph or eager"], xlabel="ms")
    axes.set_xlim(0, 1e3 * (steps[-1].start + steps[-1].seconds))
    axes.grid(visible=False)
    axes.tick_params(axis="y", length=0)


def _span(step: Shown) -> tuple[float, float]:
    return 1e3 * step.start, 1e3 * step.seconds


def _legend() -> list[Patch]:
    return [
        Patch(facecolor="#C9C9C9", label="waits"),
        Patch(facecolor=PREFILL, label="prompt"),
        Patch(facecolor=DECODE, label="decode"),
        Patch(facecolor="white", edgecolor=FAINT, hatch="/////", label="padding"),
        Patch(facecolor=GRAPH, label="graph"),
        Patch(facecolor=EAGER, edgecolor="white", hatch="xxx", label="eager"),
    ]
