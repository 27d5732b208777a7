"""Measurements of a notebook where no server may run, and their pictures."""

from __future__ import annotations

import json
from typing import Any

import matplotlib.pyplot as plt
import pytest

from labkit import plots, widgets
from labkit.serve import Launch, Server, Session, StartFailed, Timeline, read_recording
from labkit.serve import recording as module


@pytest.fixture
def graded(monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")


def test_grading_starts_nothing_and_has_what_was_recorded(graded, capsys):
    session = Session(Launch("m"), "lab5_cpu")
    assert not session.live and "this is grading" in capsys.readouterr().out
    steady = session.load("steady", [])
    assert len(steady) == 48 and all(len(t.token_times) == 24 for t in steady)
    assert session.ask("facts", lambda client: None)["kv_tokens"] == 1280
    assert "vllm:num_preemptions_total{" in session.metrics("after the storm") and "KV cache size" in session.log
    with pytest.raises(KeyError, match="nothing is recorded as 'other'"):
        session.ask("other", lambda client: 1)
    session.close()


def test_the_recording_says_nothing_of_where_it_was_made():
    text = json.dumps(read_recording("lab5_cpu"))
    assert "/root/" not in text and "/work" not in text and "/home/student/" in text


def test_an_unknown_recording_names_those_that_there_are():
    with pytest.raises(ValueError, match="lab5_cpu"):
        read_recording("lab6")


def test_a_start_that_fails_is_said_and_answered_from_the_recording(monkeypatch):
    def refuse(self, timeout=0):
        raise StartFailed("the port is taken")

    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    monkeypatch.setattr(Server, "start", refuse)
    monkeypatch.setattr(module, "why_not_live", lambda: "")
    with pytest.warns(UserWarning, match="the port is taken"):
        session = Session(Launch("m"), "lab5_cpu", show=False)
    assert not session.live and session.load("storm", [])


class Stub:
    """A server that is started in no time; what its client answers is `says`."""

    def __init__(self, launch, show=True, says=dict):
        self.alive, self.log, self.says = False, "", says

    def start(self):
        self.alive = True
        return self

    def stop(self):
        self.alive = False

    def client(self):
        return self

    def get(self, path):
        return self.says()


@pytest.fixture
def live(monkeypatch):
    monkeypatch.delenv("NBGRADER_EXECUTION", raising=False)
    monkeypatch.setattr(module, "why_not_live", lambda: "")
    monkeypatch.setattr(module, "ENDING_S", 0.2)
    monkeypatch.setattr("labkit.serve.server.Server", Stub)


def begun() -> tuple[Session, Any]:
    """A session and the stub that it runs on."""
    session = Session(Launch("m"), "lab5_cpu")
    return session, session._server


def test_a_session_that_is_begun_again_stops_the_server_of_the_one_before(live):
    first, server = begun()
    second = Session(Launch("m"), "lab5_cpu")
    assert not server.alive and not first.live and second.live, "two servers run for one cell that was run twice"
    first.close()
    third = Session(Launch("m"), "lab5_cpu")
    assert third.live and not second.live, "closing an old session again has made the new one forgotten"
    third.close()
    assert not Session._running


def test_a_server_that_has_ended_is_said_with_the_reason_and_what_to_do(live):
    session, server = begun()

    def die():
        server.alive, server.log = False, "ValueError: the moon is full\n"
        raise ConnectionRefusedError(111, "Connection refused")

    server.says = die
    with pytest.raises(RuntimeError, match=r"has ended .*the moon is full.*run the cell that starts it again"):
        session.metrics("now")
    session.close()


def test_an_error_of_a_server_that_runs_on_is_left_as_it_is(live, monkeypatch):
    monkeypatch.setattr(module, "ENDING_S", 60.0)  # of which nothing is waited for an error that is no request's
    session, server = begun()

    def fail():
        raise KeyError("mine")

    server.says = fail
    with pytest.raises(KeyError, match="mine"):
        session.metrics("now")
    session.close()


def test_a_load_that_a_dying_server_does_not_answer_is_no_measurement(live, monkeypatch):
    session, server = begun()
    silent = {"id": 0, "arrival": 0.0, "sent": 0.0, "token_times": []}

    def loaded(client, *rest):
        server.alive = False
        return [silent]

    monkeypatch.setattr(module, "_loaded", loaded)
    with pytest.raises(RuntimeError, match="has ended"):
        session.load("steady", [])
    session.close()


ANSWERED = Timeline(0, 0.0, 0.1, (1.0, 1.5, 2.0), 8, 0, queue=0.3, prefill=0.4, decode=1.0)


def test_phases_follow_on_each_other_from_arrival_to_last_token():
    found = plots.phases(ANSWERED)
    assert [name for name, _, _ in found] == list(plots.PHASES)
    assert [(a, b) for _, a, b in found] == [(0.0, pytest.approx(0.6)), (pytest.approx(0.6), 1.0), (1.0, 2.0)]
    assert plots.phases(Timeline(1, 0.0, 0.0, ())) == []
    silent = plots.phases(Timeline(2, 0.0, 0.1, (1.0,)))
    assert silent[1] == ("prefill", 0.1, 1.0), "where the engine says nothing, all before the first token is prefill"


def test_lanes_are_drawn_with_failed_requests_and_a_time():
    figure = plots.request_lanes([ANSWERED, Timeline(1, 0.5, 0.5, ())], at=1.2)
    (axes,) = figure.axes
    assert len(axes.patches) == 3 and "2 of 2" in axes.get_title(loc="left")
    plt.close(figure)
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.request_lanes([])


def test_the_lane_slider_counts_who_does_what():
    box = widgets.lane_stepper([ANSWERED, Timeline(1, 0.0, 0.0, (0.5, 2.0), prefill=0.5)], steps=5)
    controls, picture, text = box.children
    first = bytes(picture.value)
    controls.children[1].value = 1
    assert picture.value != first and text.value.startswith("after 0.50 s: <b>1</b> in queueing")
    assert "<b>1</b> in decode" in text.value


def test_the_front_and_the_choice_are_marked():
    figure = plots.pareto_chart([(1.0, 1.0), (2.0, 0.5), (3.0, 2.0)], [0, 2], 2, target=1.5)
    lines = figure.axes[0].lines
    assert [line.get_label() for line in lines] == ["beaten", "Pareto front", "objective", "chosen"]
    assert lines[1].get_drawstyle() == "steps-post", "between two settings nothing better than the cheaper is known"
    plt.close(figure)
