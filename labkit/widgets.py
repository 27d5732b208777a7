"""ipywidgets of the notebooks. They only draw: nothing that is graded lives here."""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import matplotlib.pyplot as plt
from matplotlib.figure import Figure

from labkit import plots
from labkit.pooltrace import PoolTrace, Snapshot, play
from labkit.serve.recording import Timeline
from labkit.simulate import DEMO, DEMO_SERVER, Policy, Replay, fcfs, replay
from labkit.tilewalk import TileWalk

if TYPE_CHECKING:
    import ipywidgets


def pool_trace(allocator_class: Any, num_blocks: int = 24, block_size: int = 4) -> PoolTrace:
    """Play the demonstration trace through a student's allocator; through the course's own where it does not work."""
    try:
        return play(allocator_class(num_blocks), num_blocks, block_size)
    except Exception as error:  # whatever is wrong with the student's class, the picture should still come
        reason = "is not written yet" if isinstance(error, NotImplementedError) else f"raised {type(error).__name__}"
    try:
        shipped = importlib.import_module("labkit.block_pool")
    except ImportError:  # grading hides it, since it is an answer
        return PoolTrace([_empty(num_blocks, block_size)], f"no picture: your allocator {reason}")
    trace = play(shipped.BlockPool(num_blocks, block_size), num_blocks, block_size)
    trace.note = f"your allocator {reason}: this is the course's own"
    return trace


def _empty(num_blocks: int, block_size: int) -> Snapshot:
    return Snapshot(0, block_size, ((),) * num_blocks, (0,) * num_blocks, (), (), "")


def pool_stepper(trace: PoolTrace) -> ipywidgets.Widget:
    """A slider over the steps of a trace, with a play button; the picture and the numbers follow it, back and forth."""
    return _stepper(
        len(trace.steps),
        lambda step: plots.memory_map(trace.steps[step]),
        lambda step: _numbers(trace.steps[step], trace.note),
    )


def tile_stepper(walk: TileWalk) -> ipywidgets.Widget:
    """A slider over the tiles of a FlashAttention pass: which are loaded, and m, l and acc of the rows at hand."""

    def say(step: int) -> str:
        visit = walk.visits[step]
        return f"row tile <b>{visit.row_tile}</b> takes in key tile <b>{visit.key_tile}</b>"

    return _stepper(len(walk.visits), lambda step: plots.tile_map(walk, step), say)


def policy_timeline(policies: dict[str, Policy]) -> ipywidgets.Widget:
    """A switch between policies, each of which serves the same twelve requests; picture and numbers follow it.

    A policy that fails, because it is a student's and not right yet, is replaced by first come, first served, and said.
    """
    import ipywidgets  # a lab's checks run where no Jupyter package is installed

    switch = ipywidgets.ToggleButtons(options=list(policies), style={"button_width": "auto"})
    picture = ipywidgets.Image(format="png", layout={"max_width": "940px"})
    picture.add_class("policy-picture")
    text = ipywidgets.HTML()
    drawn: dict[str, tuple[bytes, str]] = {}

    def show(name: str) -> None:
        if name not in drawn:
            result, note = _served(policies[name])
            drawn[name] = _png(plots.step_timeline(result, name)), _sums(result) + note
        picture.value, text.value = drawn[name]

    switch.observe(lambda change: show(change["new"]), names="value")
    show(switch.value)
    return ipywidgets.VBox([switch, picture, text])


def _served(policy: Policy) -> tuple[Replay, str]:
    try:
        return replay(DEMO, DEMO_SERVER, policy, record=True), ""
    except Exception as error:  # whatever is wrong with the student's policy, the picture should still come
        reason = "is not written yet" if isinstance(error, NotImplementedError) else f"raised {type(error).__name__}"
        return replay(
            DEMO, DEMO_SERVER, fcfs, record=True
        ), f"<br><i>this policy {reason}: first come, first served</i>"


def _sums(result: Replay) -> str:
    graphs, padded = sum(step.graph for step in result.steps), sum(step.padded for step in result.steps)
    return f"<b>{graphs}</b> steps by graph, <b>{result.num_steps - graphs}</b> eager, <b>{padded}</b> padded rows"


def lane_stepper(timelines: Sequence[Timeline], steps: int = 40) -> ipywidgets.Widget:
    """A slider over the time of a served load: a line across the lanes, and how many requests are in which phase."""
    end = max((t.token_times[-1] for t in timelines if t.token_times), default=0.0)

    def say(step: int) -> str:
        at = end * step / (steps - 1)
        now = [name for t in timelines for name, begin, finish in plots.phases(t) if begin <= at < finish]
        counts = ", ".join(f"<b>{now.count(name)}</b> in {name}" for name in plots.PHASES)
        return f"after {at:.2f} s: {counts}"

    return _stepper(steps, lambda step: plots.request_lanes(timelines, at=end * step / (steps - 1)), say)


def _stepper(steps: int, draw: Callable[[int], Figure], say: Callable[[int], str]) -> ipywidgets.Widget:
    """Slider and play button over `steps` pictures, each drawn when it is first shown, with a line of text below."""
    import ipywidgets  # a lab's checks run where no Jupyter package is installed

    slider = ipywidgets.IntSlider(0, 0, steps - 1, description="step", layout={"width": "60%"})
    player = ipywidgets.Play(min=0, max=steps - 1, interval=400, show_repeat=False)
    ipywidgets.jslink((player, "value"), (slider, "value"))
    picture = ipywidgets.Image(format="png", layout={"max_width": "940px"})
    picture.add_class("step-picture")
    text = ipywidgets.HTML()
    drawn: dict[int, bytes] = {}

    def show(step: int) -> None:
        if step not in drawn:
            drawn[step] = _png(draw(step))
        picture.value = drawn[step]
        text.value = say(step)

    slider.observe(lambda change: show(change["new"]), names="value")
    show(0)
    return ipywidgets.VBox([ipywidgets.HBox([player, slider]), picture, text])


def _numbers(s: Snapshot, note: str) -> str:
    waiting = f", waiting {list(s.waiting)}" if s.waiting else ""
    line = f"<b>{s.free}</b> blocks free, <b>{s.shared}</b> shared, <b>{s.wasted}</b> token slots empty in owned blocks"
    return f"{line}{waiting}<br>{s.event}" + (f"<br><i>{note}</i>" if note else "")


def _png(figure: Figure) -> bytes:
    sink = io.BytesIO()
    figure.savefig(sink, format="png", dpi=100, bbox_inches="tight")
    plt.close(figure)
    return sink.getvalue()
