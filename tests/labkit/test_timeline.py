"""The timeline of steps, and the switch between policies, without a browser."""

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pytest
from matplotlib.collections import PolyCollection

from labkit import plots, simulate, widgets
from labkit.plots import timeline


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


@pytest.fixture(scope="module")
def demo():
    return simulate.replay(simulate.DEMO, simulate.DEMO_SERVER, simulate.fcfs, record=True)


def areas(axes, face):
    """Number of rectangles of a colour."""
    colour = matplotlib.colors.to_rgba(face)
    found = [c for c in axes.collections if isinstance(c, PolyCollection) and tuple(c.get_facecolor()[0]) == colour]
    return sum(len(c.get_paths()) for c in found)


def test_every_request_has_a_lane_and_every_step_a_place_in_it(demo):
    top, padding, launches = plots.step_timeline(demo, "FCFS").axes
    assert len(top.get_yticklabels()) == 12 and top.get_title(loc="left").startswith("FCFS: mean latency")
    assert areas(top, timeline.PREFILL) == sum(len(s.prefill) for s in demo.steps)
    assert areas(top, timeline.DECODE) == sum(len(s.decode) for s in demo.steps)
    assert areas(padding, "white") == sum(s.padded for s in demo.steps) > 0, "the picture shows no padding"
    graphs = sum(s.graph for s in demo.steps)
    assert areas(launches, timeline.GRAPH) == graphs and areas(launches, timeline.EAGER) == demo.num_steps - graphs


def test_padding_and_eager_steps_are_told_apart_without_colour(demo):
    figure = plots.step_timeline(demo)
    hatched = {p.get_label(): p.get_hatch() for p in figure.legends[0].legend_handles}
    assert hatched["padding"] and hatched["eager"] and not hatched["graph"]


def test_a_replay_without_its_steps_cannot_be_drawn():
    with pytest.raises(ValueError, match="record=True"):
        plots.step_timeline(simulate.replay(simulate.DEMO, simulate.DEMO_SERVER))


def test_the_picture_and_the_numbers_follow_the_switch_back_and_forth():
    policies = {"FCFS": simulate.fcfs, "oracle": simulate.shortest(simulate.known)}
    switch, picture, text = widgets.policy_timeline(policies).children
    first = bytes(picture.value), text.value
    switch.value = "oracle"
    assert picture.value != first[0] and "padded rows" in text.value
    switch.value = "FCFS"
    assert (picture.value, text.value) == first


def test_a_policy_that_fails_is_replaced_and_that_is_said():
    def stub(waiting, now):
        raise NotImplementedError

    _, picture, text = widgets.policy_timeline({"yours": stub}).children
    assert picture.value and "this policy is not written yet: first come, first served" in text.value
