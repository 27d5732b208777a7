"""Grades one submission, in a process of its own: a course root and a gradebook that nobody else sees."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import traceback
import warnings
from dataclasses import asdict, dataclass, field
from pathlib import Path

import nbformat
from nbgrader.api import Gradebook
from nbgrader.converters import Autograde

from grading.converters import convert
from grading.course import Course
from grading.nbgrader_config import course_config
from grading.places import Unusable

# Imported here so that the fork server has them, and each worker starts in a tenth of a second.
from grading import execute, outputs, repair  # noqa: F401 isort:skip


@dataclass(frozen=True)
class Job:
    """One submission to grade. folder: its own. template: a gradebook that knows the lab. settings: SafeExecute's."""

    student: str
    lab: str
    notebook: str
    root: Path
    folder: Path
    template: Path
    settings: dict

    @property
    def result_file(self) -> Path:
        return self.folder / "result.json"


@dataclass
class Graded:
    """What a worker found. error: trouble of the grader's own, or what nbgrader refused."""

    scores: dict[str, float | None] = field(default_factory=dict)
    comments: dict[str, str | None] = field(default_factory=dict)
    report: dict = field(default_factory=dict)
    seconds: float = 0.0
    error: str = ""


def work(job: Job) -> None:
    """The process's main function. Leaves its result as a file, so that a killed one leaves none."""
    os.setsid()  # one group, so that the parent's kill reaches all of it
    warnings.simplefilter("ignore")
    with open(job.folder / "log.txt", "w", buffering=1, encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
        begun = time.monotonic()
        try:
            result = _grade(job)
        except Unusable as error:
            result = Graded(error=str(error))
        except Exception as error:
            traceback.print_exc()
            result = Graded(error=f"{type(error).__name__}: {error}"[:500])
        result.seconds = round(time.monotonic() - begun, 2)
    part = job.result_file.with_suffix(".part")
    part.write_text(json.dumps(asdict(result)), encoding="utf-8")
    part.replace(job.result_file)


def read_result(job: Job) -> Graded | None:
    """The result of a worker that has ended, or None if it left none."""
    try:
        return Graded(**json.loads(job.result_file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def _refuse_other_work(course: Course, job: Job) -> None:
    """Unusable for a notebook without an answer cell of this lab: graded, it would replace an earlier grade by 0."""
    cells = nbformat.reads(job.notebook, 4).cells
    if repair.holds_answers(cells, nbformat.read(course.release(job.lab), 4).cells):
        return
    other = [lab for lab in course.labs() if repair.holds_answers(cells, nbformat.read(course.release(lab), 4).cells)]
    is_of = f"; it is a notebook of {other[0]}" if other else ""
    raise Unusable(f"no answer cell of {job.lab} is in this notebook{is_of}")


def _grade(job: Job) -> Graded:
    _refuse_other_work(Course(job.root).activate(), job)
    course = job.folder / "course"
    handed_in = course / "submitted" / job.student / job.lab
    handed_in.mkdir(parents=True)
    (handed_in / f"{job.lab}.ipynb").write_text(job.notebook, encoding="utf-8")
    shutil.copy(job.template, course / "gradebook.db")

    config = course_config(job.root, course)
    report = job.folder / "report.json"
    config.SafeExecute.update(job.settings | {"report": str(report)})
    convert(Autograde, config, job.lab, job.student, sys.stderr)
    with Gradebook(config.CourseDirectory.db_url, config.CourseDirectory.course_id) as book:
        notebook = book.find_submission_notebook(job.lab, job.lab, job.student)
        scores = {grade.name: grade.auto_score for grade in notebook.grades}
        comments = {comment.name: comment.auto_comment for comment in notebook.comments}
    return Graded(scores, comments, json.loads(report.read_text(encoding="utf-8")))
