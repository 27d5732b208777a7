"""The one style: fonts, grid and colours."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart under all common forms of colour blindness (jfly.uni-koeln.de/color, 2008).
COLOURS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
INK, FAINT, PALE = "#222222", "#8A8A8A", "#F2F2F2"

STYLE: dict[Any, Any] = {
    "font.size": 10,
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#E3E3E3",
    "grid.linewidth": 0.8,
    "xtick.color": INK,
    "ytick.color": INK,
    "legend.frameon": False,
    "figure.dpi": 100,
}


def colour(number: int) -> str:
    """The colour of request, law or contestant `number`; the same number has the same colour in every figure."""
    return COLOURS[number % len(COLOURS)]


@contextlib.contextmanager
def figure(width: float, height: float) -> Iterator[tuple[Figure, Axes]]:
    """A figure of one axes in the camp's style, in inches, laid out so that nothing overlaps or is cut off."""
    with plt.rc_context(STYLE):
        made, axes = plt.subplots(figsize=(width, height), layout="constrained")
        yield made, axes
