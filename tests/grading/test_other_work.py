"""Notebooks that are not what the release looks like: merged answer cells, another lab's work, nothing at all."""

from __future__ import annotations

import json

import nbformat
import numpy as np
import pytest
import toy
from nbformat import NotebookNode
from toy import LAB

from grading import gradebook
from grading.course import Course
from grading.grade import Options, grade_folder
from grading.repair import repair


def merge(notebook: NotebookNode, first: str, second: str) -> None:
    """What Jupyter's "merge cells" does: one cell with the metadata of the first."""
    twin = notebook.cells.pop(toy.at(notebook, second))
    notebook.cells[toy.at(notebook, first)].source += f"\n\n{twin.source}"


@pytest.mark.parametrize(("first", "second"), [("ceil_div", "total"), ("softmax", "total")])
def test_the_starter_is_not_put_back_over_an_answer_in_another_cell(course: Course, first, second):
    notebook = toy.solved(course)
    merge(notebook, first, second)
    cells, notes = repair(notebook.cells, nbformat.read(course.release(LAB), 4).cells)
    namespace: dict = {}
    for cell in (c for c in cells if c.cell_type == "code" and c.metadata.get("nbgrader", {}).get("solution")):
        exec("import numpy as np\n" + cell.source, namespace)
    assert namespace[second](np.ones(3)) == 3.0
    assert notes == [f"{second}: its cell was missing, and another cell holds the answer"]


def test_a_notebook_without_an_answer_of_this_lab_gets_no_grade_and_an_earlier_one_stands(course: Course):
    def graded() -> tuple[str, str]:
        options = Options(workers=1, csv=course.root / "grades.csv", quiet=True)
        line = grade_folder(course.root / "in", [LAB], course, options)[0]
        return line.status, line.notes

    notebook = toy.solved(course)
    merge(notebook, "ceil_div", "total")
    toy.hand_in(course.root / "in", "ann", notebook)
    assert graded()[0] == "graded"
    other = toy.solved(course)
    for cell in other.cells:
        cell["id"], cell.metadata, cell.source = f"other{cell.id}", NotebookNode(), "print('another lab')"
    toy.hand_in(course.root / "in", "ann", other)
    assert graded() == ("failed", f"no answer cell of {LAB} is in this notebook")
    toy.hand_in(course.root / "in", "ann", json.dumps({"cells": []}))
    assert graded() == ("failed", f"no answer cell of {LAB} is in this notebook")
    with gradebook.opened(course) as book:
        assert gradebook.standing(book, LAB, "ann").score == 10.0, "the merged notebook's grade should stand"
