"""CUDA graphs of a server: what padding to captured sizes costs, and what two switches do to two times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from labkit.plots.style import FAINT, INK, MARKERS, STYLE, colour, figure, plt

WASTED = "#C4C4C4"


def padding_chart(batches: Mapping[int, int], captured: Mapping[str, Sequence[int]]) -> Figure:
    """Rows computed at each batch size: those of requests, and in grey what padding adds; one panel for each list.

    batches: requests in a step -> steps. captured: name -> capture sizes. A tick below the axis marks each size. All
    panels have one scale, so that their grey can be compared.
    """
    if not batches or not captured:
        raise ValueError("batches and captured: there is nothing to draw")
    sizes = np.array(sorted(batches))
    steps = np.array([batches[int(size)] for size in sizes])
    used = sizes * steps
    rows = {
        name: steps * np.array([min((g for g in graph_sizes if g >= size), default=size) for size in sizes])
        for name, graph_sizes in captured.items()
    }
    highest = max(int(computed.max()) for computed in rows.values())
    with plt.rc_context(STYLE):
        made, panels = plt.subplots(
            len(captured),
            1,
            figsize=(8.4, 1.7 * len(captured) + 0.6),
            sharex=True,
            sharey=True,
            squeeze=False,
            layout="constrained",
        )
        for axes, (name, graph_sizes) in zip(panels[:, 0], captured.items(), strict=True):
            computed = rows[name]
            axes.bar(sizes, used, width=1.0, color=colour(0), label="rows of requests")
            axes.bar(sizes, computed - used, bottom=used, width=1.0, color=WASTED, label="padding")
            inside = [g for g in graph_sizes if g <= sizes[-1] * 1.05]
            axes.plot(inside, [-0.05 * highest] * len(inside), linestyle="none", marker="|", color=INK, markersize=7)
            share = 1 - used.sum() / computed.sum()
            axes.set_title(f"{name}: {len(graph_sizes)} sizes, {share:.1%} of the rows are padding")
            axes.set(ylim=(-0.1 * highest, 1.05 * highest), ylabel="rows")
        panels[0, 0].legend(loc="upper right", fontsize=8)
        panels[-1, 0].set_xlabel("requests that decode together (a mark below: a captured size)")
    return made


def factorial_chart(recorded: Mapping[str, Mapping[tuple[bool, bool], Sequence[float]]]) -> Figure:
    """Every run of a 2 x 2: time over one switch, a line for each state of the other; parallel: no interaction.

    recorded: unit -> (caching on, graphs on) -> times. The axes are logarithmic, since factors are asked for. Says so
    where nothing is recorded.
    """
    if not recorded:
        with figure(6.0, 1.2) as (made, axes):
            axes.axis("off")
            axes.text(0, 0.5, "No run of the 2 x 2 is recorded yet.", color=INK)
        return made
    with plt.rc_context(STYLE):
        made, panels = plt.subplots(1, len(recorded), figsize=(8.4, 3.2), squeeze=False, layout="constrained")
        for axes, (unit, cells) in zip(panels[0], recorded.items(), strict=True):
            for number, graphs in enumerate((False, True)):
                medians = [float(np.median(cells[caching, graphs])) for caching in (False, True)]
                axes.plot((0, 1), medians, color=colour(number), marker=MARKERS[number], markersize=7,
                          label=f"graphs {'on' if graphs else 'off'}")  # fmt: skip
                for caching in (False, True):
                    runs = cells[caching, graphs]
                    axes.plot(
                        [int(caching) + 0.04] * len(runs), runs, linestyle="none", marker=".", color=FAINT, markersize=4
                    )
            axes.set_xticks((0, 1), ("caching off", "caching on"))
            axes.set(xlim=(-0.25, 1.3), yscale="log", title=unit)
            low, high = axes.get_ylim()
            ticks = [m * 10**e for e in range(-3, 6) for m in (1, 2, 5) if low < m * 10**e < high]
            axes.set_yticks(ticks, [f"{tick:g}" for tick in ticks])
            axes.yaxis.set_minor_locator(NullLocator())
        panels[0, 0].legend(fontsize=8)
    return made
