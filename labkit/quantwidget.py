"""The widget of lab 3: a row of real weights with sliders for bits, group and clamp. It only draws."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING

import matplotlib.pyplot as plt
import torch

from labkit.plots.quantizing import Quantizer, RowView, row_chart, row_view

if TYPE_CHECKING:
    import ipywidgets

    from labkit.quantlab import Head

NO_CLAMP = 12.0  # the right end of the slider: no weight of the row lies that far out
GROUPS = {"row": -1, "192": 192, "64": 64, "32": 32}


def shipped(
    weight: torch.Tensor, bits: int, group_size: int, sigmas: float
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The camp's own clamp and quantizer. ImportError where they are hidden, as in grading."""
    quant = importlib.import_module("labkit.quant")
    scheme = quant.Scheme(bits, group_size)
    made = quant.quantize(quant.clamp_sigmas(weight, sigmas, scheme), scheme)
    return made.codes, made.scales, made.zeros


def view_or_shipped(
    head: Head, row: int, bits: int, group_size: int, sigmas: float | None, quantize: Quantizer
) -> tuple[RowView | None, str]:
    """The row by a student's quantizer, or by the camp's where that fails; and a sentence that says so, or nothing."""
    try:
        return row_view(head, row, bits, group_size, sigmas, quantize), ""
    except Exception as error:  # whatever is wrong with the student's function, the picture should still come
        reason = "is not written yet" if isinstance(error, NotImplementedError) else f"raised {type(error).__name__}"
    try:
        view = row_view(head, row, bits, group_size, sigmas, shipped)
    except ImportError:
        return None, f"no picture: your function {reason}"
    return view, f"your function {reason}: this is the camp's own"


def row_explorer(head: Head, quantize: Quantizer, start: int = 28) -> ipywidgets.Widget:
    """Sliders for row, bits, group and clamp; histogram, grid and both errors follow.

    quantize: (weight, bits, group_size, sigmas) -> codes, scales, zeros. start: the row that is shown first.
    ImportError without ipywidgets.
    """
    import ipywidgets  # a lab's checks run where no Jupyter package is installed

    wide = {"width": "420px"}
    row = ipywidgets.IntSlider(start, 0, len(head.weight) - 1, description="row", layout=wide, continuous_update=False)
    bits = ipywidgets.IntSlider(4, 2, 8, description="bits", layout=wide, continuous_update=False)
    group = ipywidgets.ToggleButtons(options=GROUPS, description="group", style={"button_width": "60px"})
    clamp = ipywidgets.FloatSlider(
        3.0, min=1.0, max=NO_CLAMP, step=0.5, description="clamp", layout=wide, continuous_update=False
    )
    picture = ipywidgets.Image(format="png", layout={"max_width": "940px"})
    picture.add_class("row-picture")
    text = ipywidgets.HTML()

    def show(_: object = None) -> None:
        sigmas = None if clamp.value >= NO_CLAMP else clamp.value
        view, note = view_or_shipped(head, row.value, bits.value, group.value, sigmas, quantize)
        plain, _note = view_or_shipped(head, row.value, bits.value, group.value, None, quantize)
        if view is None or plain is None:
            text.value = f"<i>{note}</i>"
            return
        picture.value = _png(view)
        limit = "no limit" if sigmas is None else f"{sigmas:g} sigma"
        text.value = (
            f"clamp at {limit}: weight error <b>{view.weight_error:.2%}</b>"
            f" (without a clamp {plain.weight_error:.2%}), output error <b>{view.output_error:.2%}</b>"
            f" (without {plain.output_error:.2%})" + (f"<br><i>{note}</i>" if note else "")
        )

    for control in (row, bits, group, clamp):
        control.observe(show, names="value")
    show()
    return ipywidgets.VBox([ipywidgets.HBox([row, bits]), ipywidgets.HBox([clamp, group]), picture, text])


def _png(view: RowView) -> bytes:
    sink, figure = io.BytesIO(), row_chart(view)
    figure.savefig(sink, format="png", dpi=100)
    plt.close(figure)
    return sink.getvalue()
