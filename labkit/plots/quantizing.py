"""Quantization: what a clamp does to weights and to outputs, and one row of weights on its grid."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from labkit.plots.style import FAINT, INK, MARKERS, STYLE, colour

if TYPE_CHECKING:
    from labkit.quantlab import Head

Quantizer = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor]]
"""(weight, bits, group_size, sigmas) -> codes, scales, zeros, as `quantize_clamped` of lab 3."""


def clamp_chart(sigmas: Sequence[float], weight_error: Sequence[float], output_error: Sequence[float]) -> Figure:
    """Squared error over squared signal of weights and of outputs, by the clamp in standard deviations.

    ValueError unless there are as many errors of both kinds as clamps, and at least one.
    """
    if not sigmas or not len(sigmas) == len(weight_error) == len(output_error):
        raise ValueError("sigmas, weight_error and output_error must be equally long, and not empty")
    with plt.rc_context(STYLE):
        made, both = plt.subplots(1, 2, figsize=(9.6, 3.6), layout="constrained")
        titles = ("Error of the weights", "Error of the outputs, on real inputs")
        for number, (axes, title, errors) in enumerate(zip(both, titles, (weight_error, output_error), strict=True)):
            axes.plot(sigmas, errors, color=colour(number), marker=MARKERS[number])
            axes.axvline(3.0, color=FAINT, linestyle="--", linewidth=1)
            axes.set(xlabel="clamp, standard deviations", title=title, ylim=(0, 1.12 * max(errors)))
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=1))
            axes.text(3.0, 1.06 * max(errors), " 3 sigma", color=INK, va="center", fontsize=9)
        both[0].set_ylabel("squared error over squared signal")
    return made


@dataclass(frozen=True)
class RowView:
    """A row of weights and what became of it.

    cut: those more than half a step beyond their grid. steps: the first group's grid. Errors are squared, over the
    squared signal, 0 to 1.
    """

    row: np.ndarray
    cut: np.ndarray
    steps: np.ndarray
    name: str
    weight_error: float
    output_error: float


def row_view(head: Head, row: int, bits: int, group_size: int, sigmas: float | None, quantize: Quantizer) -> RowView:
    """One row of a head, quantized. sigmas: None for no clamp. Errors are those of this row alone."""
    weight = head.weight[row : row + 1]
    codes, scales, zeros = quantize(weight, bits, group_size, 1e9 if sigmas is None else sigmas)
    groups = codes.reshape(*scales.shape, -1).float()
    rounded = ((groups - zeros.float()[..., None]) * scales[..., None]).reshape(weight.shape)
    x, lost = head.evaluation, rounded - weight
    beyond = lost.abs() > 0.51 * scales.repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    group = "whole row" if group_size < 0 else f"groups of {group_size}"
    clamp = "no clamp" if sigmas is None else f"clamp at {sigmas:g} sigma"
    return RowView(
        weight[0].numpy(),
        weight[beyond].numpy(),
        (np.arange(2**bits) - zeros[0, 0].item()) * scales[0, 0].item(),
        f"row {row}, {bits} bits, {group}, {clamp}",
        (lost.square().sum() / weight.square().sum()).item(),
        ((x @ lost.T).square().sum() / (x @ weight.T).square().sum()).item(),
    )


def row_chart(view: RowView) -> Figure:
    """Histogram of the weights over the grid of the row's first group, which ones were cut, and both errors."""
    with plt.rc_context(STYLE):
        made, (axes, side) = plt.subplots(
            1, 2, figsize=(9.6, 3.8), layout="constrained", gridspec_kw={"width_ratios": [3.4, 1]}
        )
        reach = 1.05 * float(np.abs(view.row).max())
        axes.grid(visible=False)
        for number, step in enumerate(view.steps):
            label = "grid of the first group" if number == 0 else None
            axes.axvline(step, color=colour(1), linewidth=1.0, alpha=0.7, zorder=0, label=label)
        axes.hist(view.row, bins=96, range=(-reach, reach), color=colour(0), label="weights")
        if count := len(view.cut):
            axes.plot(
                view.cut, np.full(count, 0.6), linestyle="none", color=colour(5), marker="v", label=f"{count} cut off"
            )
        axes.set(xlabel="weight", ylabel="how many (log)", yscale="log", xlim=(-reach, reach), title=view.name)
        axes.legend(loc="upper left", fontsize=9)
        errors = [100 * view.weight_error, 100 * view.output_error]
        bars = side.bar(["weights", "outputs"], errors, color=[colour(0), colour(5)], width=0.6)
        side.bar_label(bars, [f"{e:.2g} %" for e in errors])
        side.set(title="Squared error", ylim=(0, max(1.2 * max(errors), 2.5)), ylabel="% of the squared signal")
    return made
