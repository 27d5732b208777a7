"""labkit.checks: rows, scores, messages; stderr kept out of a cell; questions found by id."""

from __future__ import annotations

import linecache
import logging
import os
import subprocess
import sys
import types

import pytest

from labkit.checks import (
    Failed,
    Question,
    Result,
    Row,
    capture,
    check,
    find_question,
    questions_of,
    registry,
    require,
    score,
)
from labkit.checks.running import MAX_MESSAGE, NOT_SOLVED


@pytest.fixture
def question(monkeypatch) -> Question:
    q = Question("double", "lab", "numbers are doubled")
    monkeypatch.setattr(registry, "_found", {q.id: q})

    @q.invariant("small numbers", share=3)
    def _(answer):
        require(answer(2) == 4, "2 doubled is 4")

    @q.invariant("large numbers")
    def _(answer):
        require(answer(10**9) == 2 * 10**9, "large numbers count too")
        return 0.25

    return q


def rows_of(answer) -> list[Row]:
    return list(check("double", answer).rows)


def test_a_right_answer_earns_all_points_and_shows_its_error_ratio(question, capsys):
    assert score(check("double", lambda x: 2 * x), points=3) == 3.0
    assert "[error 0.25 of what is allowed]" in capsys.readouterr().out


def test_each_invariant_is_worth_its_share(question, capsys):
    value = score(check("double", lambda x: 4), points=2)
    assert value == 1.5 and type(value) is float
    assert "large numbers count too" in capsys.readouterr().out


def test_a_wrong_answer_is_told_the_invariants_own_sentence(question):
    first, second = rows_of(lambda x: x)
    assert not first.passed and first.message == "2 doubled is 4"
    assert not second.passed and second.message == "large numbers count too"


def test_an_unsolved_starter_is_called_unsolved_and_earns_nothing(question):
    def double(x):
        raise NotImplementedError

    assert [r.message for r in rows_of(double)] == [NOT_SOLVED, NOT_SOLVED]


def test_a_half_written_answer_keeps_what_works(question):
    def double(x):
        if x < 10:
            return 2 * x
        raise NotImplementedError

    first, second = rows_of(double)
    assert first.passed and second.message == NOT_SOLVED


def test_a_library_that_lacks_something_is_not_called_unsolved(question):
    def double(x):
        raise NotImplementedError("no kernel for this dtype")

    assert "NotImplementedError: no kernel for this dtype" in rows_of(double)[0].message


@pytest.mark.parametrize("error", [SystemExit(1), MemoryError(), RecursionError("deep")])
def test_an_exception_of_the_answer_never_leaves_the_check(question, error):
    def double(x):
        raise error

    assert f"your code raised {type(error).__name__}" in rows_of(double)[0].message


def test_an_exception_that_cannot_be_printed_is_named(question):
    class Odd(Exception):
        def __str__(self):
            raise RuntimeError

    def double(x):
        raise Odd

    assert rows_of(double)[0].message.startswith("your code raised Odd")


def test_the_line_of_the_notebook_is_shown_and_not_that_of_a_library(question):
    source = "import json\ndef double(x):\n    return json.loads('{')\n"
    linecache.cache["<cell double>"] = (len(source), None, source.splitlines(keepends=True), "<cell double>")
    namespace: dict = {}
    exec(compile(source, "<cell double>", "exec"), namespace)
    assert rows_of(namespace["double"])[0].message.endswith("(at `return json.loads('{')`)")


def test_a_message_is_cut_before_it_hides_the_rest(question):
    def double(x):
        raise ValueError("x" * 10_000)

    assert len(rows_of(double)[0].message) < MAX_MESSAGE + 10


def test_what_the_answer_writes_to_stderr_stays_out_of_the_cell_and_in_the_message(question, capfd):
    def double(x):
        print("a hint", file=sys.stderr)
        return 0

    assert "(last line on stderr: a hint)" in rows_of(double)[0].message
    assert capfd.readouterr().err == ""


def test_a_forbidden_answer_fails_every_row_with_the_reason(question):
    def double(x): ...

    double.__module__ = "kernels.double"
    assert all("is the camp's own code" in r.message for r in rows_of(double))


def test_an_unknown_question_is_told_which_there_are(question):
    with pytest.raises(KeyError, match="no question 'triple'; there are: double"):
        check("triple", None)


@pytest.mark.parametrize("points", [0.0, 1, 2.5])
def test_a_score_is_a_plain_float_within_its_points(points, capsys):
    for passed in (True, False):
        value = score(Result("q", (Row("r", 1.0, passed),), "interpreter"), points)
        assert type(value) is float and value == (points if passed else 0.0)
    assert score(Result("q", (), "interpreter"), points) == 0.0


def test_a_nan_share_scores_nothing(capsys):
    assert score(Result("q", (Row("r", float("nan"), True),), "interpreter")) == 0.0


def test_a_result_says_which_tier_proved_it():
    text = str(Result("q", (Row("a name", 1.0, False, "look here"),), "interpreter"))
    assert "proved on: interpreter" in text and "FAIL  a name" in text and "look here" in text


def test_require_raises_failed_with_its_message():
    with pytest.raises(Failed, match="look here"):
        require(False, "look here")
    require(True, "never said")


# stderr


def test_all_that_writes_to_stderr_is_caught(capfd):
    with capture.stderr() as said:
        print("python", file=sys.stderr)
        os.write(2, b"descriptor\n")
        subprocess.run([sys.executable, "-c", "import sys; sys.stderr.write('child\\n')"], check=True)
    assert said() == "python\ndescriptor\nchild\n"
    assert capfd.readouterr().err == ""
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_a_log_handler_made_before_is_caught_too(capfd):
    handler = logging.StreamHandler(sys.stderr)
    logger = logging.getLogger("labkit.test.capture")
    logger.addHandler(handler)
    stream = handler.stream
    try:
        with capture.stderr() as said:
            logger.error("logged")
        assert "logged" in said() and capfd.readouterr().err == ""
        assert handler.stream is stream
    finally:
        logger.removeHandler(handler)


def test_an_exception_inside_leaves_stderr_as_it_was(capfd):
    with pytest.raises(ZeroDivisionError), capture.stderr():
        1 / 0  # noqa: B018
    print("after", file=sys.stderr)
    assert capfd.readouterr().err == "after\n"


def test_only_the_end_of_a_flood_is_kept():
    with capture.stderr() as said:
        for _ in range(30):
            os.write(2, b"x" * 10_000)
        os.write(2, b"the end")
    assert len(said()) == capture.KEPT and said().endswith("the end")


def test_capturing_inside_a_capture_gives_each_its_own():
    with capture.stderr() as outer:
        print("one", file=sys.stderr)
        with capture.stderr() as inner:
            print("two", file=sys.stderr)
    assert (outer(), inner()) == ("one\n", "two\n")


# the registry


@pytest.fixture
def lab_modules(monkeypatch):
    """Replaces the labs' packages by modules with these QUESTIONS."""

    def install(**questions):
        monkeypatch.setattr(registry, "_found", {})
        found = [types.SimpleNamespace(name=name) for name in questions]
        monkeypatch.setattr(registry.pkgutil, "iter_modules", lambda path: found)
        for name, declared in questions.items():
            module = types.ModuleType(name)
            module.QUESTIONS = declared
            monkeypatch.setitem(sys.modules, f"labkit.checks.{name}", module)

    return install


def test_questions_are_found_by_id_and_by_lab(lab_modules):
    a, b, c = Question("a", "lab1_x", ""), Question("b", "lab1_x", ""), Question("c", "lab2_y", "")
    lab_modules(lab1_x=[a, b], lab2_y=[c])
    assert find_question("b") is b
    assert questions_of("lab1_x") == [a, b]
    with pytest.raises(KeyError, match="no questions for lab 'lab3'; there are: lab1_x, lab2_y"):
        questions_of("lab3")


def test_an_id_that_is_declared_twice_is_refused_every_time(lab_modules):
    lab_modules(lab1_x=[Question("a", "lab1_x", "")], lab2_y=[Question("a", "lab2_y", "")])
    for _ in range(2):  # a half-filled registry would let the second call pass
        with pytest.raises(ValueError, match="'a' is declared twice"):
            find_question("a")
