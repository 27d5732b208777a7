"""Figures of lab 3's second half: errors on their way, and a cache's bytes against its damage."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from matplotlib.figure import Figure

from labkit.plots.style import MARKERS, colour, figure


def error_chart(curve: Mapping[str, Sequence[float]], bits: Iterable[int]) -> Figure:
    """Relative errors by bits a weight, one line each, on a logarithmic axis: a straight line halves at each bit.

    Later lines and their markers are smaller, so that of two that coincide both are seen.
    """
    with figure(6.4, 3.4) as (made, axes):
        for number, (name, errors) in enumerate(curve.items()):
            thin = len(curve) - number
            axes.semilogy(list(bits), errors, color=colour(number), marker=MARKERS[number % len(MARKERS)], label=name,
                          markersize=3 + 1.6 * thin, linewidth=0.6 + 0.8 * thin)  # fmt: skip
        axes.set(xlabel="bits a weight", ylabel="relative error", title="From weights to attention")
        axes.legend()
    return made


def damage_chart(policies: Mapping[str, tuple[float, float]]) -> Figure:
    """policies: name -> (bits a number, KL in nat). What lies lower and further left is better."""
    with figure(6.4, 3.2) as (made, axes):
        axes.margins(0.12, 0.12)  # room for the names
        for number, (name, (bits, kl)) in enumerate(policies.items()):
            axes.semilogy([bits], [kl], color=colour(number), marker=MARKERS[number % len(MARKERS)])
            axes.annotate(name, (bits, kl), textcoords="offset points", xytext=(6, 4))
        axes.set(xlabel="bits a number, scale and offset included", ylabel="KL to the exact cache, nat")
    return made


def loss_chart(losses: Sequence[float], what: str) -> Figure:
    """A loss by training step, on a logarithmic axis. what: the label of its axis."""
    with figure(6.4, 3.0) as (made, axes):
        axes.semilogy(losses, color=colour(0))
        axes.set(xlabel="step", ylabel=what)
    return made
