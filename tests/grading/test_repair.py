"""What RepairCells makes of a notebook whose cells and metadata a student has moved, copied, stripped or edited."""

from __future__ import annotations

import time

import nbformat
import pytest
import toy
from cheats import SCENARIOS
from nbformat import NotebookNode
from nbformat.v4 import new_output
from nbgrader.utils import determine_grade
from toy import LAB

from grading.checkcell import make_plain
from grading.clean import clean_notebook
from grading.outputs import StderrIsNotFailure
from grading.repair import repair
from grading.session import _as_seen

ACCIDENTS = [
    "perfect", "a_deleted_check_cell", "everything_of_the_first_question_deleted", "a_deleted_answer",
    "a_copied_check_cell", "a_copied_answer", "a_split_answer", "a_changed_grade_id", "changed_cell_ids",
    "stripped_metadata", "stripped_metadata_and_changed_ids", "a_check_cell_turned_into_markdown",
    "points_edited_to_a_thousand", "a_tag_that_skips_the_check", "an_endless_loop_in_an_answer",
]  # fmt: skip


@pytest.fixture
def release(course) -> NotebookNode:
    return nbformat.read(course.release(LAB), 4)


@pytest.mark.parametrize("accident", ACCIDENTS)
def test_every_cell_of_the_release_is_there_once_with_its_own_metadata(course, release, accident):
    notebook = toy.solved(course)
    SCENARIOS[accident].edit(notebook)
    cells, _ = repair(clean_notebook(nbformat.writes(notebook)).cells, release.cells)
    got = [(c.id, c.cell_type, c.metadata) for c in cells if "nbgrader" in c.metadata]
    assert got == [(c.id, c.cell_type, c.metadata) for c in release.cells if "nbgrader" in c.metadata]
    assert len({c.id for c in cells}) == len(cells), "two cells share an id"


@pytest.mark.parametrize("accident", ["a_split_answer", "a_copied_answer", "stripped_metadata_and_changed_ids"])
def test_the_cell_that_holds_the_answer_is_the_answer(course, release, accident):
    notebook = toy.solved(course)
    SCENARIOS[accident].edit(notebook)
    cells, _ = repair(clean_notebook(nbformat.writes(notebook)).cells, release.cells)
    answers = {c.metadata.nbgrader.grade_id: c.source for c in cells if "nbgrader" in c.metadata}
    for question in ("ceil_div", "total", "softmax"):
        assert f"def {question}(" in answers[question], f"another cell was taken for {question}"


def test_a_notebook_whose_lines_end_otherwise_is_matched_by_its_text(course, release):
    notebook = toy.solved(course)
    for cell in notebook.cells:
        cell.metadata.pop("nbgrader", None)
        cell.source = cell.source.replace("\n", "  \r\n") + "\r\n"
    SCENARIOS["changed_cell_ids"].edit(notebook)
    _, notes = repair(clean_notebook(nbformat.writes(notebook)).cells, release.cells)
    assert notes and all(note.endswith("its metadata was restored") for note in notes), notes


def test_an_untouched_notebook_needs_no_repair(course, release):
    assert repair(toy.solved(course).cells, release.cells)[1] == []


def scored(*outputs: NotebookNode) -> list[NotebookNode]:
    cell = nbformat.v4.new_code_cell("x", outputs=list(outputs))
    make_plain(cell, points=5.0)
    return cell.outputs


def result(text: str) -> NotebookNode:
    return new_output("execute_result", data={"text/plain": text}, execution_count=1)


@pytest.mark.parametrize("text", ["nan", "-1", "7.0", "None", "[1, 2]", "np.float64(2.0)", "'5'", "inf", ""])
def test_what_nbgrader_takes_for_full_marks_is_no_score(text):
    assert scored(result(text))[-1].ename == "NoScore"


def test_no_result_and_two_results_are_no_score():
    assert scored()[-1].ename == "NoScore" and scored(result("1"), result("2"))[-1].ename == "NoScore"


def test_a_plain_number_within_the_points_stands():
    assert scored(result("2.5"))[0].data["text/plain"] == "2.5"


def test_an_error_after_a_result_takes_the_result_away():
    outputs = scored(result("5.0"), new_output("error", ename="E", evalue="", traceback=[]))
    assert [o.output_type for o in outputs] == ["error"]


def test_stderr_is_no_failure():
    said = new_output("stream", name="stderr", text="INFO engine started")
    cell = nbformat.v4.new_code_cell("x", outputs=[said, result("2.0")])
    cell.metadata["nbgrader"] = {"grade": True, "solution": False, "points": 5}
    assert determine_grade(cell)[0] == 0, "nbgrader gives points to a cell with stderr now: is the step still needed?"
    StderrIsNotFailure().preprocess_cell(cell, {}, 0)
    assert determine_grade(cell)[0] == 2.0


def test_a_progress_bar_is_kept_as_it_ended():
    assert _as_seen("start\n 10%\r 50%\r100%\r\nend") == "start\n100%\nend"


def test_a_long_line_costs_no_time():
    begun = time.monotonic()
    _as_seen("x" * 5_000_000)
    assert time.monotonic() - begun < 2, "the time grows faster than the line: a student could stop the grader with it"
