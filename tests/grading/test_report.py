"""The table, the CSV and the feedback pages, whatever a student calls a file."""

from __future__ import annotations

import csv
import io

import pytest
from rich.console import Console

from grading import grade
from grading.course import Course
from grading.report import Line, print_table, write_csv

NASTY = ["[/]", "[bold]x", "\ud800", "r\udce9sum\udce9.txt", "\x1b[2J", "a\u202eb"]


@pytest.mark.parametrize("text", NASTY)
def test_no_name_stops_the_table_or_the_csv(tmp_path, text):
    lines = [Line(text, text, "failed", notes=text)]
    said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8")
    print_table(lines, Console(file=said, width=200))
    write_csv(lines, tmp_path / "grades.csv")
    said.seek(0)
    assert "failed" in said.read()
    row = next(csv.DictReader((tmp_path / "grades.csv").open(encoding="utf-8")))
    assert row["student"] == row["notes"] != "" and row["student"].replace("\n", "").isprintable()


@pytest.mark.parametrize(("text", "written"), [("", ""), ("=1+1", "'=1+1"), ("-rf", "'-rf"), ("ann", "ann")])
def test_a_formula_gets_a_quote_mark_and_an_empty_field_none(tmp_path, text, written):
    write_csv([Line("lab", "ann", "graded", notes=text)], tmp_path / "grades.csv")
    row = next(csv.DictReader((tmp_path / "grades.csv").open()))
    assert (row["notes"], row["tier"]) == (written, "")


def page(course: Course, lab: str, student: str, target) -> None:
    """Stands in for the writing of a page: the student's name says what happens."""
    if student == "bad":
        raise ValueError("a page that cannot be made")
    (target / student).write_text("page")


def test_a_page_that_cannot_be_made_costs_one_page(tmp_path, monkeypatch):
    monkeypatch.setattr("grading.gradebook.feedback", page)
    lines = [Line("lab", student, "graded", score=1.0, max_score=1.0) for student in ("ann", "bad", "zoe")]
    noted = grade._write_feedback(Course(), lines, tmp_path, 1)
    assert (tmp_path / "ann").exists() and (tmp_path / "zoe").exists()
    assert [line.notes for line in noted] == ["", "no feedback page: ValueError: a page that cannot be made", ""]
