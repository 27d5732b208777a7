"""grading.blackbox: what a hidden check's driver sees of the notebook, and what the notebook sees of it."""

from __future__ import annotations

import numpy as np
import pytest

from grading import blackbox
from grading.blackbox import Failed, Remote
from labkit.cells import run_cell


@pytest.fixture
def notebook() -> dict:
    return {"__name__": "__main__"}


@pytest.fixture
def remote(notebook, capsys) -> Remote:
    def execute(source: str) -> tuple[str, str]:
        capsys.readouterr()
        try:
            run_cell(source, notebook, "blackbox")
        except Exception as error:
            return "", f"{type(error).__name__}: {error}"
        return capsys.readouterr().out, ""

    return Remote(execute)


def write(function: str, n: int) -> list[int]:
    return [globals()[function](n), answer(n)]  # noqa: F821  (a name of the notebook)


def test_a_driver_looks_names_up_in_the_notebook_and_overwrites_none(notebook, remote):
    exec("def write(n):\n    return n + 1\ndef answer(n):\n    return write(n)", notebook)
    assert remote.call(write, "answer", 3) == [4, 4], "the student's helper `write` was replaced by the driver"
    assert notebook["write"](1) == 2 and "DRIVER" not in notebook and "names" not in notebook


def test_scratch_variables_that_hide_built_ins_cost_nothing(notebook, remote):
    exec("def answer(x):\n    return x * 2", notebook)
    notebook.update(
        dict.fromkeys(("str", "list", "isinstance", "tuple", "enumerate", "zip", "hasattr", "print", "exec"))
    )
    assert np.array_equal(remote.call("answer", np.arange(3)), [0, 2, 4]) and remote.call("answer", [1]) == [1, 1]


def test_an_answer_that_is_missing_or_raises_is_named(notebook, remote):
    with pytest.raises(Failed, match="answer raised NameError: name 'answer' is not defined"):
        remote.call("answer", 1)
    exec("def answer(x):\n    raise KeyError(x)", notebook)
    with pytest.raises(Failed, match="answer raised KeyError: 1"):
        remote.call("answer", 1)


def test_a_small_reply_that_grows_is_refused_before_it_does(notebook, remote, monkeypatch):
    monkeypatch.setattr(np, "savez", np.savez_compressed)
    notebook["answer"] = lambda n: np.zeros(n)
    assert len(remote.call("answer", 10)) == 10
    with pytest.raises(Failed, match=r"could not be read \(ValueError: the result has 80000360 bytes"):
        remote.call("answer", blackbox.RESULT_BYTES // 8 + 2_000_000 + 10)
