"""What a feedback page holds of the outputs and texts of a student."""

from __future__ import annotations

import shutil

import nbformat
import pytest
import toy
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_output
from toy import LAB

from grading import gradebook
from grading.course import Course
from grading.outputs import HarmlessOutputs
from grading.repair import repair

SCRIPT = "<script>window.MARK = 1</script><img src=x onerror='window.MARK = 2'>"
SHOWN = {
    "text/html": f"<table><tr><th>head</th></tr></table>{SCRIPT}",
    "image/svg+xml": f"<svg>{SCRIPT}</svg>",
    "text/latex": f"$x$ {SCRIPT}",
    "text/markdown": f"# Head {SCRIPT}",
    "application/javascript": "window.MARK = 3",
    "image/png": f'AA=="> {SCRIPT}',
    "application/vnd.jupyter.widget-view+json": {"model_id": SCRIPT},
}


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> str:
    """A feedback page of a notebook that tries everything."""
    course = toy.make_course(tmp_path_factory.mktemp("course"))
    notebook = toy.solved(course)
    for kind, value in SHOWN.items():
        display = new_output(
            "display_data", {kind: value}, metadata={"width": f'1"> {SCRIPT}', kind: {"isolated": True}}
        )
        notebook.cells.append(new_code_cell("display()", outputs=[display]))
    notebook.cells.append(new_markdown_cell("<details><summary>Hint</summary>$a < b$</details>"))
    notebook.cells.append(new_markdown_cell(f"# The text\n\n{SCRIPT}\n\n[link](javascript:window.MARK) **bold**"))
    return write_feedback(course, notebook)


def write_feedback(course: Course, notebook: NotebookNode) -> str:
    gradebook.register(course, LAB)
    with gradebook.opened(course) as book:
        book.update_or_create_student("ann")
        book.update_or_create_submission(LAB, "ann")
    release = nbformat.read(course.release(LAB), 4)
    repair(notebook.cells, release.cells)
    place = toy.hand_in(course.root / "grading" / "autograded", "ann", notebook)
    try:
        return gradebook.feedback(course, LAB, "ann", course.root / "pages").read_text()
    finally:
        shutil.rmtree(place)


def test_no_script_of_a_student_is_in_a_page(page):
    for mark in ("<script>window", "<img src=x", "window.MARK = 3", "<svg", 'href="javascript:'):
        assert mark not in page, f"the page holds {mark!r}"


def test_text_and_tables_are_still_shown(page):
    for shown in ("<th>head</th>", "<strong>bold</strong>", "The text", "<details><summary>Hint"):
        assert shown in page, f"the page lost {shown!r}"


def test_an_image_is_kept_and_an_output_of_another_kind_is_told():
    outputs = [new_output("display_data", {kind: "AAAA"}) for kind in ("image/png", "image/svg+xml")]
    cell, _ = HarmlessOutputs().preprocess_cell(new_code_cell("x", outputs=outputs), {}, 0)
    assert cell.outputs[0].data == {"image/png": "AAAA"}
    assert cell.outputs[1].data == {"text/plain": "(an output that is not shown here)"}
