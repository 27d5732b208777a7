"""Bars, races and rooflines."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter

from labkit.plots.style import FAINT, INK, MARKERS, colour, figure
from labkit.races import Race
from labkit.roofline import Ceilings, Work


def bars(
    values: Mapping[str, float],
    *,
    title: str = "",
    unit: str = "",
    spread: Mapping[str, tuple[float, float]] | None = None,
    faint: Collection[str] = (),
    line: float | None = None,
) -> Figure:
    """Horizontal bars with their values written out, in the given order from top to bottom.

    spread: name -> (low, high), drawn as an error bar. faint: bars to be drawn in grey. line: a value to compare with,
    drawn across all bars.
    """
    if not values:
        raise ValueError("values: there is nothing to draw")
    names = list(values)
    reach = max([*values.values(), *(high for _, high in (spread or {}).values()), line or 0.0, 0.0])
    with figure(8.0, 0.46 * len(names) + 1.1) as (made, axes):
        for row, name in enumerate(names):
            axes.barh(row, values[name], color="#C4C4C4" if name in faint else colour(0), height=0.66)
            end = values[name]
            if spread and name in spread:
                low, high = spread[name]
                error = [[max(values[name] - low, 0)], [max(high - values[name], 0)]]
                axes.errorbar(values[name], row, xerr=error, color=INK, capsize=3, linewidth=1)
                end = max(end, high)
            axes.text(end + 0.012 * reach, row, _number(values[name], unit), va="center", fontsize=9, color=INK)
        if line is not None:
            axes.axvline(line, color=INK, linewidth=1, linestyle="--")
        axes.set_yticks(range(len(names)), names)
        axes.set(ylim=(len(names) - 0.4, -0.6), xlim=(0, 1.16 * reach or 1), xlabel=unit)
        axes.grid(visible=False, axis="y")
        axes.tick_params(axis="y", length=0)
        axes.set_title(title)
    return made


def _number(value: float, unit: str) -> str:
    if unit.startswith("times "):
        return f"{value:.2f}x"
    return f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def race_chart(result: Race, title: str = "") -> Figure:
    """Speed of each contestant as a multiple of the baseline, with its interval; an inconclusive one says so."""
    ratios = {name: result.ratio(name) for name in result.seconds}
    labels = {name: name if ratio.conclusive else f"{name}\n(inconclusive)" for name, ratio in ratios.items()}
    return bars(
        {labels[name]: ratio.value for name, ratio in ratios.items()},
        spread={labels[name]: (ratio.low, ratio.high) for name, ratio in ratios.items() if name != result.baseline},
        title=title or f"On {result.device}, median of {len(result.seconds[result.baseline])} interleaved rounds",
        faint=[labels[name] for name, ratio in ratios.items() if not ratio.conclusive],
        unit=f"times as fast as {result.baseline}",
        line=1.0,
    )


def roofline_chart(on: Ceilings, points: Sequence[tuple[Work, float]], dtype: str = "float32") -> Figure:
    """Measured operations under this device's roof: FLOP/s over FLOPs a byte, both logarithmic.

    points: (work, measured seconds). dtype: whose peak is drawn. ValueError if it was not measured, or for work
    without FLOPs, which has no place on this plot.
    """
    if dtype not in on.flops:
        raise ValueError(f"dtype: no peak of {dtype!r} was measured on {on.device}, only {', '.join(on.flops)}")
    for work, _ in points:
        if not work.flops:
            raise ValueError(f"points: {work.name} does no FLOPs, so it has no place on a roofline")
    bandwidth, peak = max(on.read, on.copy), on.flops[dtype]
    ridge = peak / bandwidth
    intensities = [ridge, *(work.intensity for work, _ in points)]
    x = np.geomspace(min(intensities) / 4, max(intensities) * 4, 200)
    with figure(8.0, 4.6) as (made, axes):
        axes.plot(x, np.minimum(x * bandwidth, peak) / 1e9, color=INK, linewidth=1.8)
        axes.axvline(ridge, color=FAINT, linestyle=":", linewidth=1)
        for number, (work, seconds) in enumerate(points):
            reached = work.flops / seconds
            of_roof = reached / min(work.intensity * bandwidth, peak)
            axes.plot(
                work.intensity, reached / 1e9, linestyle="none", marker=MARKERS[number % len(MARKERS)], markersize=9,
                color=colour(number), label=f"{work.name}: {of_roof:.0%} of its roof",
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="FLOPs a byte", ylabel="GFLOP/s")
        axes.set_title(f"{on.device}: {bandwidth / 1e9:,.0f} GB/s, {peak / 1e12:,.2f} TFLOP/s {dtype}")
        axes.annotate("memory-bound", (ridge, axes.get_ylim()[0]), xytext=(-8, 6), textcoords="offset points",
                      ha="right", color=FAINT, fontsize=9)  # fmt: skip
        axes.annotate("compute-bound", (ridge, axes.get_ylim()[0]), xytext=(8, 6), textcoords="offset points",
                      color=FAINT, fontsize=9)  # fmt: skip
        axes.legend(loc="best")
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5), numticks=12))
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda value, _: f"{value:,g}")
            axis.set_minor_formatter(NullFormatter())
    return made
