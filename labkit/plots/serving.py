"""A served load: what each request was doing when, and what resources buy."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.plots.style import FAINT, INK, colour, figure
from labkit.serve.recording import Timeline

PHASES = ("queueing", "prefill", "decode")
PHASE_COLOURS = dict(zip(PHASES, (colour(1), colour(4), colour(2)), strict=True))
MOST_LANES = 60


def phases(timeline: Timeline) -> list[tuple[str, float, float]]:
    """(phase, begin, end) of an answered request, in seconds from the start of the run; they follow on each other.

    The engine's own durations of queue and prefill are laid before the first token, as the client saw it: what lies
    before them (the way there, and a wait of the client's) counts as queueing. Where the engine says nothing, all
    before the first token is prefill.
    """
    if not timeline.token_times:
        return []
    first, last = timeline.token_times[0], timeline.token_times[-1]
    scheduled = timeline.sent if timeline.prefill is None else max(timeline.arrival, first - timeline.prefill)
    bounds = (min(timeline.arrival, scheduled), scheduled, first, last)
    return [(name, a, b) for name, a, b in zip(PHASES, bounds, bounds[1:], strict=False)]


def request_lanes(timelines: Sequence[Timeline], at: float | None = None, title: str = "") -> Figure:
    """One lane a request, from arrival to last token, by phase; each token is a tick. at: a time to draw a line at.

    A request without an answer is a cross at its arrival. At most 60 lanes are drawn, the first ones.
    """
    if not timelines:
        raise ValueError("timelines: there is nothing to draw")
    shown = list(timelines)[:MOST_LANES]
    with figure(9.0, 0.13 * len(shown) + 1.5) as (made, axes):
        for row, timeline in enumerate(shown):
            for name, begin, end in phases(timeline):
                axes.barh(row, end - begin, left=begin, height=0.8, color=PHASE_COLOURS[name], linewidth=0)
            if timeline.token_times:
                axes.plot(timeline.token_times, [row] * len(timeline.token_times), "|", color=INK, markersize=3)
            else:
                axes.plot(timeline.arrival, row, "x", color=colour(5))
        if at is not None:
            axes.axvline(at, color=INK, linewidth=1.2)
        axes.set(xlabel="seconds from the start of the load", ylabel="request", ylim=(len(shown) - 0.4, -0.6))
        axes.set_title(title or f"{len(shown)} of {len(timelines)} requests")
        axes.grid(visible=False, axis="y")
        handles = [Patch(color=c, label=n) for n, c in PHASE_COLOURS.items()]
        axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), ncols=3)
    return made


def pareto_chart(
    points: Sequence[tuple[float, float]],
    front: Sequence[int],
    chosen: int | None = None,
    *,
    cost: str = "KV blocks",
    value: str = "good requests a second",
    target: float | None = None,
) -> Figure:
    """Settings as points (cost, value), those of the front joined by steps, the chosen one ringed.

    target: a value to draw a line at. Between two points of the front nothing better than the cheaper one is known, so
    its line is level there.
    """
    with figure(7.0, 4.0) as (made, axes):
        behind = [p for i, p in enumerate(points) if i not in set(front)]
        axes.plot([c for c, _ in behind], [v for _, v in behind], "o", color=FAINT, label="beaten")
        ahead = [points[i] for i in front]
        axes.plot(
            [c for c, _ in ahead], [v for _, v in ahead], "s-", color=colour(0), label="Pareto front",
            drawstyle="steps-post",
        )  # fmt: skip
        if target is not None:
            axes.axhline(target, color=INK, linestyle=":", linewidth=1, label="objective")
        if chosen is not None:
            axes.plot(*points[chosen], "o", color=colour(5), markersize=15, fillstyle="none", label="chosen")
        axes.set(xlabel=cost, ylabel=value, ylim=(0, None), xlim=(0, None))
        axes.legend(loc="lower right")
    return made
