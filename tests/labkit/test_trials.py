"""Claims that are judged one by one, and what a cell says that has nothing to show."""

from __future__ import annotations

import pytest

from labkit.trials import Trial, Verdicts, nothing_to_show


def test_what_one_experiment_raises_leaves_that_claim_open_and_no_other():
    def fails() -> tuple[str, bool]:
        raise ImportError("no libc10.so\nand more")

    found = Verdicts(
        [
            Trial.asked("the moon is full", "look", "yes", lambda: ("it is new", False)),
            Trial.asked("it is served", "start it", "yes", fails),
        ]
    )
    assert [t.verdict for t in found] == ["refuted", "open"]
    assert found[1].measured == "ImportError: no libc10.so", "the reason is said, in one line"
    assert "[   open] it is served" in repr(found)


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (NotImplementedError(), "a question that this needs is not solved yet"),
        (NameError("name 'listed' is not defined"), "a cell above gave no result (name 'listed' is not defined)"),
        (StopIteration(), "StopIteration"),
    ],
)
def test_an_open_claim_says_what_is_missing(error, said):
    def fails() -> tuple[str, bool]:
        raise error

    assert Trial.asked("", "", "", fails).measured == said


def test_a_cell_asks_for_a_solution_only_where_that_is_what_is_missing():
    assert nothing_to_show(NotImplementedError(), "question 12") == "solve question 12 first"
    said = nothing_to_show(RuntimeError("vLLM is not installed"), "question 12")
    assert said.startswith("nothing to show: RuntimeError: vLLM is not installed.") and "solve" not in said


def test_a_table_of_verdicts_shows_signs_of_html_as_they_are():
    (row,) = [Trial("a < b", "x", "<b>", "1", True)]
    assert "a &lt; b" in Verdicts([row])._repr_html_() and "<b>" not in Verdicts([row])._repr_html_()
