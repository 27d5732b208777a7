"""Grades one class in which every student does something else wrong, and reads from the result what became of each."""

from __future__ import annotations

import csv
import socket
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
import toy
from cheats import HISTORY, SCENARIOS, SPY
from nbformat import NotebookNode
from toy import LAB

from grading import gradebook
from grading.course import ROOT, Course
from grading.grade import Options, grade_folder
from grading.report import Line
from grading.sandbox import unavailable

pytestmark = [
    pytest.mark.skipif(bool(unavailable()), reason=f"no sandbox here: {unavailable()}"),
    pytest.mark.timeout(1800),  # one class, graded once for all tests: two kernels for each of some fifty students
]

SETTINGS = {"cell_seconds": float(toy.CELL_SECONDS), "longest_cell_seconds": float(toy.CELL_SECONDS)}
ALWAYS = {"perfect", "a_changed_data_file", "an_endless_print", "the_hidden_checks_looked_for_in_the_history"}
MARKER = "camp-test-left-behind"


@dataclass
class Class:
    """A graded class: its course, its report, and where the pages are."""

    course: Course
    lines: dict[str, Line]
    scores: dict[str, dict[str, float | None]]
    csv: Path

    def notebook(self, student: str) -> NotebookNode:
        return nbformat.read(self.course.root / "grading" / "autograded" / student / LAB / f"{LAB}.ipynb", 4)

    def said(self, student: str) -> str:
        texts = [o.get("text", "") for c in self.notebook(student).cells for o in c.get("outputs", [])]
        return "".join(texts)


@pytest.fixture(scope="module")
def graded(tmp_path_factory, request) -> Class:
    tmp = tmp_path_factory.mktemp("class")
    course = toy.make_course(tmp / "course")
    (course.root / "labs" / LAB / "data.txt").write_text("the released numbers")
    handed_in = tmp / "handed_in"
    wanted = {
        item.callspec.params["student"]
        for item in request.session.items
        if "student" in getattr(item, "fixturenames", ())
    }
    for student in SCENARIOS.keys() & (wanted | ALWAYS):
        notebook = toy.solved(course)
        SCENARIOS[student].edit(notebook)
        place = toy.hand_in(handed_in, student, notebook)
        for name, text in SCENARIOS[student].files.items():
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text(text)
    toy.hand_in(handed_in, "broken_json", '{"cells": [')
    toy.hand_in(handed_in, "no_notebook", "just text", name="answers.txt")
    toy.hand_in(handed_in, "renamed", toy.solved(course), name=f"{LAB}-Copy1.ipynb")
    toy.hand_in(handed_in, "张伟", toy.solved(course), name="我的作业.ipynb")
    with socket.create_server(("127.0.0.1", 0)) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv("CAMP_TEST_SECRET", "the grader's own")
        spy = toy.solved(course)
        toy.insert(
            spy, SPY.format(root=str(course.root), repository=str(ROOT), port=server.getsockname()[1], marker=MARKER)
        )
        toy.hand_in(handed_in, "spy", spy)
        options = Options(3, "require", ["perfect", "absent"], None, tmp / "grades.csv", SETTINGS, quiet=True)
        lines = grade_folder(handed_in, [LAB], course, options)
    scores = {}
    with gradebook.opened(course) as book:
        for submission in book.assignment_submissions(LAB):
            scores[submission.student.id] = {g.name: g.auto_score for n in submission.notebooks for g in n.grades}
    return Class(course, {line.student: line for line in lines}, scores, tmp / "grades.csv")


ROWS = [pytest.param(name, marks=[pytest.mark.slow] if row.slow else []) for name, row in SCENARIOS.items()]


@pytest.mark.parametrize("student", ROWS)
def test_each_mishap_and_cheat_costs_what_it_should_and_no_more(graded: Class, student: str):
    expected, line = SCENARIOS[student], graded.lines[student]
    assert graded.scores.get(student) == expected.scores, f"{student}: {line.notes}"
    assert line.status == expected.status, line.notes
    assert expected.note in line.notes, line.notes
    assert line.score == sum(expected.scores.values())


def test_a_broken_file_fails_alone_with_a_sentence(graded: Class):
    assert graded.lines["broken_json"].status == "failed" and "not readable" in graded.lines["broken_json"].notes
    assert graded.lines["no_notebook"].status == "failed" and f"no {LAB}.ipynb" in graded.lines["no_notebook"].notes


def test_a_renamed_notebook_is_found_whatever_the_alphabet(graded: Class, tmp_path):
    for student in ("renamed", "张伟"):
        assert graded.lines[student].score == 10.0 and "renamed" in graded.lines[student].notes
    assert "(Score: 10.0 / 10.0)" in gradebook.feedback(graded.course, LAB, "张伟", tmp_path).read_text()


def test_the_csv_names_the_failed_the_tampered_and_the_missing(graded: Class):
    rows = {row["student"]: row for row in csv.DictReader(graded.csv.open())}
    assert rows["absent"]["status"] == "missing" and rows["perfect"]["status"] == "graded"
    assert rows["broken_json"]["status"] == "failed" and rows["the_shipped_answer"]["status"] == "tampered"
    assert "kernels.toy_answer" in rows["the_shipped_answer"]["notes"]
    assert rows["perfect"]["sandbox"] == "bwrap" and rows["perfect"]["tier"] in ("interpreter", "cuda")


def test_the_kernel_sees_nothing_of_the_course_and_no_network(graded: Class):
    said = graded.said("spy")
    assert "SEEN: []" in said, said
    assert "NOTEBOOKS: []" in said and "NETWORK: closed" in said and "GRADING: closed" in said, said
    assert "USER: 65534 0000000000000000" in said and "SECRET: None" in said, said
    assert graded.lines["spy"].score == 10.0, graded.lines["spy"].notes


def test_what_a_kernel_started_ends_with_it(graded: Class):
    assert graded.lines["spy"].status == "graded"
    alive = [p for p in Path("/proc").glob("[0-9]*/cmdline") if MARKER.encode() in _read(p)]
    assert not alive, "a process that the student detached outlived the sandbox"


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:
        return b""


def test_the_released_data_file_is_what_the_notebook_reads(graded: Class):
    assert "DATA: the released numbers" in graded.said("a_changed_data_file")


@pytest.mark.parametrize("student", ["an_endless_print", "a_line_of_100_mb_and_thousands_of_displays"])
def test_a_flood_of_output_is_cut(graded: Class, student: str):
    path = graded.course.root / "grading" / "autograded" / student / LAB / f"{LAB}.ipynb"
    assert path.stat().st_size < 1_000_000, "the flood went into the autograded notebook"


def test_the_feedback_shows_points_and_nothing_of_a_hidden_check(graded: Class, tmp_path):
    page = gradebook.feedback(graded.course, LAB, "an_answer_that_fails_one_hidden_check", tmp_path).read_text()
    assert "(Score: 2.0 / 3.0)" in page, "the points of the hidden cell should be shown"
    for leak in ("hidden message", "blackbox", "BEGIN HIDDEN", "SECRET_OF_THE_HIDDEN_CHECK"):
        assert leak not in page, f"the feedback shows {leak!r}"


def test_the_instructor_reads_why_a_hidden_check_failed(graded: Class):
    assert "wrong for a million tokens: the hidden message" in graded.said("an_answer_that_fails_one_hidden_check")


def test_a_later_cell_finds_nothing_of_a_hidden_check(graded: Class):
    assert f"{HISTORY} []" in graded.said("the_hidden_checks_looked_for_in_the_history")
