"""nbgrader's gradebook: registering a lab, merging what workers graded, and keeping question ids frozen.

Each worker grades into a gradebook of its own; only the coordinator writes here, so there is nothing to lock. What an
instructor entered (manual scores, extra credit, comments, due dates, extensions) is never touched.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from nbgrader.api import Gradebook
from nbgrader.converters import GenerateAssignment, GenerateFeedback
from sqlalchemy.exc import SAWarning
from traitlets.config import Config

from grading.converters import convert
from grading.course import Course
from grading.freeze import check_frozen
from grading.nbgrader_config import course_config


@contextlib.contextmanager
def opened(course: Course) -> Iterator[Gradebook]:
    """The course's gradebook, made if there is none."""
    course.gradebook.parent.mkdir(parents=True, exist_ok=True)
    _find_alembic()
    url, course_id = f"sqlite:///{course.gradebook}", course_config().CourseDirectory.course_id
    with warnings.catch_warnings(), Gradebook(url, course_id) as book:
        warnings.simplefilter("ignore", SAWarning)  # nbgrader's own way with sessions, nothing of ours
        yield book


def register(course: Course, lab: str) -> None:
    """Record a lab's cells, with their hidden parts, in the gradebook: what `nbgrader generate_assignment` does.

    FrozenError when submissions exist and the set of graded cells has changed.
    """
    _find_alembic()
    course.gradebook.parent.mkdir(parents=True, exist_ok=True)
    solved = course.root / "solutions" / lab / f"{lab}.ipynb"
    check_frozen(course.root, lab, solved.read_text(encoding="utf-8"))
    with tempfile.TemporaryDirectory() as folder:
        config = course_config(course.root)
        config.CourseDirectory.release_directory = folder
        config.CourseDirectory.db_url = f"sqlite:///{course.gradebook}"
        convert(GenerateAssignment, config, lab)


def _find_alembic() -> None:
    """nbgrader starts `alembic` by name for a new gradebook, and our Python's folder need not be on PATH."""
    folder = str(Path(sys.executable).parent)
    if folder not in os.environ["PATH"].split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ["PATH"]])


def feedback(course: Course, lab: str, student: str, target: Path) -> Path:
    """Write a student's feedback page from the autograded notebook and the gradebook; gives the file."""
    with tempfile.TemporaryDirectory() as folder:
        config = course_config(course.root, Path(folder))
        config.CourseDirectory.db_url = f"sqlite:///{course.gradebook}"
        shutil.copytree(
            course.root / "grading" / "autograded" / student / lab, Path(folder) / "autograded" / student / lab
        )
        convert(GenerateFeedback, config, lab, student)
        page = target / student / lab / f"{lab}.html"
        page.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(Path(folder) / "feedback" / student / lab / f"{lab}.html", page)
    return page


@dataclass(frozen=True)
class Standing:
    """A student's grade for a lab, with manual scores and the late penalty."""

    score: float
    max_score: float
    penalty: float
    needs_manual: bool


def merge(
    book: Gradebook, lab: str, student: str, scores: dict[str, float | None], comments: dict[str, str | None],
    submitted: datetime | None, config: Config,
) -> Standing:  # fmt: skip
    """Put a worker's automatic scores into the gradebook and renew the late penalty from the resulting score."""
    book.update_or_create_student(student)
    extra = {"timestamp": submitted} if submitted else {}
    submission = book.update_or_create_submission(lab, student, **extra)
    for name, score in scores.items():
        grade = book.find_grade(name, lab, lab, student)
        grade.auto_score = score
        # A person who overrode this score should see that the automatic one is new; the override stands until then.
        grade.needs_manual_grade = grade.manual_score is not None or score is None
    for name, comment in comments.items():
        book.find_comment(name, lab, lab, student).auto_comment = comment
    book.db.commit()
    notebook = book.find_submission_notebook(lab, lab, student)
    book.db.refresh(notebook)
    notebook.late_submission_penalty = _penalty(student, notebook.score, submission.total_seconds_late, config)
    book.db.commit()
    return standing(book, lab, student)


def _penalty(student: str, score: float, seconds_late: float, config: Config) -> float | None:
    from nbgrader.preprocessors import AssignLatePenalties

    if seconds_late <= 0:
        return None
    policy = AssignLatePenalties(config=config)
    policy.init_plugin()
    penalty = policy.plugin_inst.late_submission_penalty(student, score, seconds_late)
    return None if penalty is None else min(max(float(penalty), 0.0), score)


def standing(book: Gradebook, lab: str, student: str) -> Standing:
    """What the gradebook says now."""
    notebook = book.find_submission_notebook(lab, lab, student)
    penalty = notebook.late_submission_penalty or 0.0
    return Standing(notebook.score - penalty, notebook.max_score, penalty, notebook.needs_manual_grade)
