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


def gradient(function: str) -> list:
    import torch

    x = torch.ones(2, requires_grad=True)
    globals()[function](x).sum().backward()
    return [str(x.dtype), x.grad.tolist()]


def test_what_one_answer_sets_in_torch_does_not_reach_the_next(notebook, remote):
    exec("import torch\ndef answer(x):\n    return 3 * x\ndef greedy():\n    torch.set_grad_enabled(False)\n"
         "    torch.set_default_dtype(torch.float64)\n    return 1", notebook)  # fmt: skip
    assert remote.call("greedy") == 1
    assert remote.call(gradient, "answer") == ["torch.float32", [3.0, 3.0]]


def annotated(x: np.ndarray) -> int:
    return answer(len(x))  # noqa: F821  (a name of the notebook)


def test_a_drivers_annotations_are_not_looked_up_among_the_students_names(notebook, remote):
    exec("np = 'a note'\ndef answer(n):\n    return n", notebook)
    assert remote.call(annotated, [1, 2, 3]) == 3


@pytest.mark.parametrize(
    "given, want",
    [
        ("np.int64(3)", 3),
        ("[np.int64(4), np.float32(0.5), np.bool_(True)]", [4, 0.5, True]),
        ("('FULL', np.int64(8))", ("FULL", 8)),
        ("{'itl': np.array([0.5, 0.25]), 'ttft': torch.tensor(2.0), 'at': (n for n in (1, 2))}",
         {"itl": [0.5, 0.25], "ttft": 2.0, "at": [1, 2]}),
    ],
)  # fmt: skip
def test_numpys_numbers_tensors_and_iterators_come_back_as_what_they_hold(notebook, remote, given, want):
    exec(f"import torch\nimport numpy as np\ndef answer():\n    return {given}", notebook)
    assert remote.call("answer") == want, "a right answer in other types than a list's must not lose its hidden points"


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
