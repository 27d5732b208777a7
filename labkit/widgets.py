"""ipywidgets of the notebooks. They only draw: nothing that is graded lives here."""

from __future__ import annotations

import importlib
import io
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt

from labkit import plots
from labkit.pooltrace import PoolTrace, Snapshot, play

if TYPE_CHECKING:
    import ipywidgets


def pool_trace(allocator_class: Any, num_blocks: int = 24, block_size: int = 4) -> PoolTrace:
    """Play the demonstration trace through a student's allocator; through the camp's own where it does not work."""
    try:
        return play(allocator_class(num_blocks), num_blocks, block_size)
    except Exception as error:  # whatever is wrong with the student's class, the picture should still come
        reason = "is not written yet" if isinstance(error, NotImplementedError) else f"raised {type(error).__name__}"
    try:
        shipped = importlib.import_module("labkit.block_pool")
    except ImportError:  # grading hides it, since it is an answer
        return PoolTrace([_empty(num_blocks, block_size)], f"no picture: your allocator {reason}")
    trace = play(shipped.BlockPool(num_blocks, block_size), num_blocks, block_size)
    trace.note = f"your allocator {reason}: this is the camp's own"
    return trace


def _empty(num_blocks: int, block_size: int) -> Snapshot:
    return Snapshot(0, block_size, ((),) * num_blocks, (0,) * num_blocks, (), (), "")


def pool_stepper(trace: PoolTrace) -> ipywidgets.Widget:
    """A slider over the steps of a trace, with a play button; the picture and the numbers follow it, back and forth."""
    import ipywidgets  # a lab's checks run where no Jupyter package is installed

    last = len(trace.steps) - 1
    slider = ipywidgets.IntSlider(0, 0, last, description="step", layout={"width": "60%"})
    player = ipywidgets.Play(min=0, max=last, interval=400, show_repeat=False)
    ipywidgets.jslink((player, "value"), (slider, "value"))
    picture = ipywidgets.Image(format="png", layout={"max_width": "860px"})
    picture.add_class("pool-picture")
    numbers = ipywidgets.HTML()
    drawn: dict[int, bytes] = {}

    def show(step: int) -> None:
        snapshot = trace.steps[step]
        if step not in drawn:
            drawn[step] = _png(snapshot)
        picture.value = drawn[step]
        numbers.value = _numbers(snapshot, trace.note)

    slider.observe(lambda change: show(change["new"]), names="value")
    show(0)
    return ipywidgets.VBox([ipywidgets.HBox([player, slider]), picture, numbers])


def _numbers(s: Snapshot, note: str) -> str:
    waiting = f", waiting {list(s.waiting)}" if s.waiting else ""
    line = f"<b>{s.free}</b> blocks free, <b>{s.shared}</b> shared, <b>{s.wasted}</b> token slots empty in owned blocks"
    return f"{line}{waiting}<br>{s.event}" + (f"<br><i>{note}</i>" if note else "")


def _png(snapshot: Snapshot) -> bytes:
    figure = plots.memory_map(snapshot)
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=100, bbox_inches="tight")
    plt.close(figure)
    return sink.getvalue()
