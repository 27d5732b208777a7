"""`make demo`: a whole class, headless, in a temporary folder, from the real notebooks. Is every grade right?"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from rich.console import Console
from rich.table import Table

from grading import build, gradebook
from grading.course import ROOT, Course
from grading.grade import Options, grade_folder
from grading.release import write_bundle
from grading.report import Line
from labkit.cells import Cell, needed, read_cells
from labkit.workspace import make_copy, submit

LOOP = "while True:\n    pass\n"
LOOP_SECONDS = 15.0  # for cells without a limit of their own: enough for a lab's demonstrations


@dataclass(frozen=True)
class Expected:
    """What a submission must earn, per graded cell; a cell that is not named may earn anything up to its points."""

    scores: dict[str, float]
    notes: tuple[str, ...] = ()


def play() -> bool:
    """Build, release, hand in, grade, give feedback; True if every grade is what it must be."""
    console, begun = Console(), time.monotonic()
    with tempfile.TemporaryDirectory(prefix="camp-demo-") as folder:
        place = Path(folder)
        course = _course(place / "course")
        write_bundle(place / "bundle")
        console.print(f"built and released {len(course.labs())} lab(s); three students hand in each of them")
        expected = {}
        for lab in course.labs():
            for student, hand_in in STUDENTS.items():
                expected[student, lab] = hand_in(place, lab)
        settings = {"cell_seconds": LOOP_SECONDS}
        options = Options(
            settings=settings, feedback=place / "feedback", csv=place / "grades.csv", roster=[*STUDENTS, "absent"]
        )
        lines = grade_folder(place / "handed_in", course=course, options=options)
        wrong = _compare(course, lines, expected, place)
    for sentence in wrong:
        console.print(f"[red]WRONG[/] {sentence}", highlight=False)
    console.print(
        f"{'all grades are what they must be' if not wrong else 'the demo failed'}, {time.monotonic() - begun:.0f} s"
    )
    return not wrong


def _course(root: Path) -> Course:
    """A course of its own, so that the demo never touches the gradebook: the real sources, built anew."""
    for lab in build.labs():
        source = root / "solutions" / lab / f"{lab}.nb.py"
        source.parent.mkdir(parents=True)
        source.write_bytes((ROOT / "solutions" / lab / source.name).read_bytes())
        build.build(lab, root=root)
    return Course(root)


def _solved(place: Path, lab: str) -> tuple[NotebookNode, list[str]]:
    """What a perfect student has: the bundle's notebook with the solution's cells; and its questions in order."""
    notebook = nbformat.read(place / "bundle" / "labs" / lab / f"{lab}.ipynb", 4)
    answers = {c.id: c.source for c in _solution_cells(lab) if c.is_solution}
    for cell in notebook.cells:
        cell.source = answers.get(_id(cell), cell.source)
    return notebook, list(answers)


def _solution_cells(lab: str) -> list[Cell]:
    return read_cells(ROOT / "solutions" / lab / f"{lab}.ipynb")


def _id(cell: NotebookNode) -> str:
    return str(cell.metadata.get("nbgrader", {}).get("grade_id", ""))


def _points(lab: str) -> dict[str, float]:
    return {c.id: c.points for c in _solution_cells(lab) if c.points is not None}


def hand_in_solved(place: Path, lab: str) -> Expected:
    """Every answer is the solution. Handed in as `labkit start` and `labkit submit` do it."""
    notebook, _ = _solved(place, lab)
    work = place / "work"
    make_copy(lab, work, place / "bundle")
    nbformat.write(notebook, work / lab / f"{lab}.ipynb")
    (place / "handed_in").mkdir(exist_ok=True)
    submit(lab, work, place / "bundle", "solved", place / "handed_in")
    return Expected(_points(lab))


def hand_in_half(place: Path, lab: str) -> Expected:
    """Every second question is answered, the others are as released."""
    notebook, questions = _solved(place, lab)
    blank = set(questions[1::2])
    starters = {c.id: c.source for c in read_cells(place / "bundle" / "labs" / lab / f"{lab}.ipynb")}
    for cell in notebook.cells:
        cell.source = starters[_id(cell)] if _id(cell) in blank else cell.source
    _write(place, "half", lab, notebook)
    return Expected(_without(lab, blank))


def hand_in_broken(place: Path, lab: str) -> Expected:
    """A cell that never ends, a syntax error, and a deleted check cell."""
    notebook, questions = _solved(place, lab)
    loops, breaks, deleted = questions[0], questions[-1], questions[len(questions) // 2]
    for cell in notebook.cells:
        if _id(cell) == loops:
            cell.source = LOOP + cell.source
            cell.metadata["timeout"] = 10**6
        elif _id(cell) == breaks:
            cell.source = cell.source.replace("(", "((", 1)
    notebook.cells = [c for c in notebook.cells if _id(c) != f"{deleted}_check"]
    _write(place, "broken", lab, notebook)
    return Expected(_without(lab, {loops, breaks}), (f"hung in {loops}", f"{deleted}_check: the cell was missing"))


STUDENTS: dict[str, Callable[[Path, str], Expected]] = {
    "solved": hand_in_solved,
    "half": hand_in_half,
    "broken": hand_in_broken,
}


def _write(place: Path, student: str, lab: str, notebook: NotebookNode) -> None:
    target = place / "handed_in" / student / lab / f"{lab}.ipynb"
    target.parent.mkdir(parents=True)
    nbformat.write(notebook, target)


def _without(lab: str, blank: set[str]) -> dict[str, float]:
    """Full points, none for the blank questions, and no expectation where an answer calls a blank one."""
    cells, scores = _solution_cells(lab), _points(lab)
    for name in list(scores):
        question = Cell(name, "").question
        if question in blank:
            scores[name] = 0.0
        elif blank & {c.id for c in needed(cells, [question, f"{question}_check"])}:
            del scores[name]
    return scores


def _compare(course: Course, lines: list[Line], expected: dict[tuple[str, str], Expected], place: Path) -> list[str]:
    """Sentences about what is not as it must be, and a table of what was earned."""
    by_name = {(line.student, line.lab): line for line in lines}
    wrong = []
    table = Table("lab", "student", "points", "of", "must be", title="What the demo checks")
    with gradebook.opened(course) as book:
        for (student, lab), must in expected.items():
            line = by_name[student, lab]
            if line.status != "graded":
                wrong.append(f"{student} in {lab} is {line.status}: {line.notes}")
                continue
            got = {g.name: g.auto_score for g in book.find_submission_notebook(lab, lab, student).grades}
            wrong += [
                f"{student} in {lab}: {name} earned {got.get(name)}, {points} expected"
                for name, points in must.scores.items()
                if got.get(name) != points
            ]
            wrong += [f"{student} in {lab}: the report does not say {n!r}" for n in must.notes if n not in line.notes]
            if not (place / "feedback" / student / lab / f"{lab}.html").is_file():
                wrong.append(f"{student} in {lab}: there is no feedback page")
            least = sum(must.scores.values())
            free = sum(_points(lab).values()) - sum(_points(lab)[name] for name in must.scores)
            table.add_row(
                lab,
                student,
                f"{line.score:g}",
                f"{line.max_score:g}",
                f"{least:g} to {least + free:g}" if free else f"{least:g}",
            )
    Console().print(table)
    missing = [line for line in lines if line.status == "missing"]
    if len(missing) != len(course.labs()):
        wrong.append(f"{len(missing)} missing submissions were reported, {len(course.labs())} expected")
    return wrong
