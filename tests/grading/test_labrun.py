"""grading.labrun: a lab's own solution, starter and mutants, graded as submissions are."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from grading import blackbox, labrun
from labkit.cells import Cell
from labkit.checks import Question, registry, require

LAB = "lab1_toy"
DOUBLE = "def double(x):\n    return 2 * x"


@pytest.fixture(autouse=True)
def toy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A camp of one lab with the questions `double` and `triple`; each has one public and two hidden checks."""
    questions = {q: Question(q, LAB, "") for q in ("double", "triple")}
    for question, factor in (("double", 2), ("triple", 3)):
        questions[question].invariant("one is right")(lambda f, n=factor: require(f(1) == n, f"{n} times 1 is {n}"))
        for x in (5, -5):

            def hidden(remote, question=question, x=x, factor=factor):
                require(remote.call(question, x) == factor * x, f"hidden: {factor} times {x} is wrong")

            monkeypatch.setitem(blackbox.CHECKS, (LAB, question), [*blackbox.CHECKS.get((LAB, question), []), hidden])
    monkeypatch.setattr(registry, "_found", questions)
    monkeypatch.setitem(sys.modules, f"grading.hidden.{LAB}", types.ModuleType("hidden"))
    monkeypatch.setattr(labrun, "ROOT", tmp_path)
    return tmp_path


def book(double: str = DOUBLE, triple: str = "def triple(x):\n    return double(x) + x") -> list[Cell]:
    cells = [Cell("setup", "import labkit", is_locked=True)]
    for question, source in (("double", double), ("triple", triple)):
        cells += [
            Cell(question, source, is_solution=True),
            Cell(
                f"{question}_check", f"labkit.score(labkit.check('{question}', {question}), points=2)", 2.0, False, True
            ),
            Cell(f"{question}_hidden", f"# blackbox: {LAB}:{question}", 1.0, False, True),
        ]
    return cells


def graded(cells: list[Cell], *questions: str) -> dict[str, float]:
    return {q: g.earned for q, g in labrun.grade(cells, list(questions or ("double", "triple"))).items()}


def test_a_solution_earns_its_visible_and_its_hidden_points():
    grades = labrun.grade(book(), ["double", "triple"])
    assert [(g.earned, g.possible) for g in grades.values()] == [(3.0, 3.0), (3.0, 3.0)]


def test_a_hidden_check_that_fails_costs_its_share_and_says_so():
    grade = labrun.grade(book(double="def double(x):\n    return 2 * abs(x)"), ["double"])["double"]
    assert grade.earned == 2.5 and "hidden: 2 times -5 is wrong" in grade.said


def test_an_unsolved_answer_earns_nothing():
    assert graded(book(double="def double(x):\n    raise NotImplementedError"), "double") == {"double": 0.0}


def test_a_wrong_answer_costs_what_depends_on_it_and_nothing_else():
    assert graded(book(triple="def triple(x):\n    return 0")) == {"double": 3.0, "triple": 0.0}


def test_a_crash_is_a_grade_of_nothing_and_says_why():
    grade = labrun.grade(book(double="import signal\nsignal.raise_signal(9)\n" + DOUBLE), ["double"])["double"]
    assert (grade.earned, grade.possible) == (0.0, 3.0) and "SIGKILL" in grade.said


def test_a_forbidden_name_costs_the_question_and_those_that_depend_on_it():
    grades = labrun.grade(book(double="def double(x):\n    return eval('2 * x')"), ["double", "triple"])
    assert [g.earned for g in grades.values()] == [0.0, 0.0]
    assert all("`eval` may not be used in this answer" in g.said for g in grades.values())


def test_sources_are_replaced_by_cell_id():
    changed = labrun.with_sources(book(), {"double": "x"})
    assert [c.source for c in changed if c.id == "double"] == ["x"]
    assert [c for c in changed if c.id != "double"] == [c for c in book() if c.id != "double"]


# mutants


@pytest.fixture
def mutant(toy):
    """Writes tests/mutants/<lab>/<name>.toml and reads the lab's mutants."""
    raw = {"cell_type": "code", "source": DOUBLE, "metadata": {"nbgrader": {"grade_id": "double", "solution": True}}}
    path = toy / "solutions" / LAB / f"{LAB}.ipynb"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"cells": [raw]}))

    def read(text: str, name: str = "double") -> list[labrun.Mutant]:
        toml = toy / "tests" / "mutants" / LAB / f"{name}.toml"
        toml.parent.mkdir(parents=True)
        toml.write_text(text)
        return labrun.mutants(LAB)

    return read


def test_a_mutant_is_the_solution_with_one_place_changed(mutant):
    (m,) = mutant('[[mutant]]\nname = "add"\nmessage = "2 times"\nold = "2 * x"\nnew = "2 + x"')
    assert m == labrun.Mutant("add", "double", "def double(x):\n    return 2 + x", "2 times", False)


def test_a_mutant_may_be_a_whole_cell(mutant):
    (m,) = mutant('[[mutant]]\nname = "own"\nmessage = "m"\nsource = "double = abs"\nscores_zero = true')
    assert m.source == "double = abs" and m.scores_zero


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('name = "n"\nmessage = "m"\nold = "3 * x"\nnew = "x"', "`old` stands 0 times in the solution, not once"),
        ('name = "n"\nmessage = "m"\nold = "x"\nnew = "y"', "`old` stands 2 times in the solution, not once"),
        ('name = "n"\nold = "2"\nnew = "3"', "mutant 'n' lacks message"),
        ('name = "n"\nmessage = "m"\nold = "2"', "mutant 'n' lacks new"),
        ('name = "n"\nmessage = "m"\nold = "2"\nnew = "2"', "mutant 'n' is the solution itself"),
    ],
)
def test_a_mutant_that_no_longer_applies_is_named(mutant, text, words):
    with pytest.raises(ValueError, match=words):
        mutant(f"[[mutant]]\n{text}")


def test_a_mutant_of_an_unknown_question_is_named(mutant):
    with pytest.raises(ValueError, match=r"halve\.toml: the lab has no question 'halve'"):
        mutant('[[mutant]]\nname = "n"\nmessage = "m"\nsource = "x"', name="halve")
