"""Buckets of captured graphs: what padding costs, by the number of graphs."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, PercentFormatter

from labkit.plots.style import INK, MARKERS, colour, figure


def ladder_chart(best: Mapping[int, float], others: Mapping[str, tuple[int, float]] | None = None) -> Figure:
    """Share of computed rows that are padding, over the number of captured sizes.

    best: number of graphs -> share (0 to 1) of the best choice of that many. others: name -> (number of graphs, share)
    of ladders to compare with. ValueError if there is nothing to draw.
    """
    if not best:
        raise ValueError("best: there is nothing to draw")
    with figure(8.0, 4.2) as (made, axes):
        counts = sorted(best)
        axes.plot(counts, [best[n] for n in counts], color=colour(0), marker=MARKERS[0], label="best choice")
        for number, (name, (graphs, share)) in enumerate((others or {}).items(), 1):
            axes.plot(
                graphs, share, color=colour(number), marker=MARKERS[number % len(MARKERS)], markersize=10,
                linestyle="none", label=f"{name}: {graphs}, {share:.1%}", markeredgecolor=INK,
            )  # fmt: skip
        top = 1.1 * max([0.01, *best.values(), *(share for _, share in (others or {}).values())])
        axes.set_ylim(0, top)
        axes.set_yticks([tick for tick in axes.get_yticks() if tick <= top])
        graphs_at_most = max([*counts, *(graphs for graphs, _ in (others or {}).values())])
        axes.set_xlim(0, graphs_at_most + 1)
        axes.xaxis.set_major_locator(FixedLocator(range(0, graphs_at_most + 1, 1 + graphs_at_most // 20)))
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(xlabel="captured graphs", ylabel="rows that are padding")
        axes.set_title("What padding costs, by the number of graphs")
        axes.legend(loc="upper right")
    return made
