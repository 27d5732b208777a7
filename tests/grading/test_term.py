"""What an instructor does in a term: override a score, fix a check and grade again, take off points for being late."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
import toy
from toy import LAB

from grading import build, gradebook
from grading.converters import convert
from grading.course import ROOT, Course
from grading.freeze import FrozenError
from grading.grade import Options, grade_folder
from grading.late import DAY, PerDay
from grading.nbgrader_config import course_config
from grading.report import Line


def grade(course: Course, student: str = "ann") -> Line:
    options = Options(workers=1, csv=course.root / "grades.csv", quiet=True)
    return {line.student: line for line in grade_folder(course.root / "in", [LAB], course, options)}[student]


def hidden_file(course: Course):
    return course.root / "grading" / "hidden" / f"{LAB}.py"


def test_a_term(course: Course):
    """Grade with a faulty check; override; set a due date; fix the check; grade again, twice."""
    right = hidden_file(course).read_text()
    hidden_file(course).write_text(right.replace("== 21.0", "== 22.0"))
    place = toy.hand_in(course.root / "in", "ann", toy.solved(course))
    (place / "timestamp.txt").write_text("2030-05-03 12:00:00 UTC")
    assert grade(course).score == 9.0, "the faulty hidden check should cost its point"

    with gradebook.opened(course) as book:
        assert not book.find_submission(LAB, "ann").needs_manual_grade
        kept = book.find_grade("softmax_hidden", LAB, LAB, "ann")
        kept.manual_score, kept.extra_credit = 1.5, 0.25
        book.find_comment("softmax", LAB, LAB, "ann").manual_comment = "numerically fine, see me about the scale"
        book.db.commit()
        book.update_or_create_assignment(LAB, duedate=datetime(2030, 5, 2, 12, 0))  # one day before

    hidden_file(course).write_text(right)
    again = grade(course)
    assert again.score == pytest.approx((10 - 2 + 1.75) * 0.9), (
        "fixed check, kept override and extra credit, a day late"
    )
    assert again.late_penalty == pytest.approx(0.975) and again.needs_manual
    with gradebook.opened(course) as book:
        assert book.find_grade("softmax_hidden", LAB, LAB, "ann").manual_score == 1.5, "a regrade lost a manual score"
        assert book.find_grade("softmax_hidden", LAB, LAB, "ann").auto_score == 2.0
        assert book.find_comment("softmax", LAB, LAB, "ann").comment.startswith("numerically fine")
        book.grant_extension(LAB, "ann", days=2)

    third = grade(course)
    assert third.late_penalty == 0 and third.score == 9.75, "an extension takes the penalty away"
    assert replace(grade(course), seconds=0) == replace(third, seconds=0), "grading again changes something"


def test_questions_are_frozen_while_submissions_exist(course: Course):
    source = course.root / "solutions" / LAB / f"{LAB}.nb.py"
    original = source.read_text()
    gradebook.register(course, LAB)
    source.write_text(original.replace("A toy lab", "A toy lab, second printing"))
    build.build(LAB, root=course.root)  # no submission yet: anything goes

    with gradebook.opened(course) as book:
        book.add_student("ann")
        book.add_submission(LAB, "ann")
    source.write_text(original.split('# %% question="softmax"')[0])
    before = course.release(LAB).read_bytes()
    with pytest.raises(FrozenError, match=r"1 submissions.*-softmax, -softmax_check, -softmax_hidden"):
        build.build(LAB, root=course.root)
    assert course.release(LAB).read_bytes() == before, "a refused build must not touch the release"

    source.write_text(original.replace("A toy lab", "A toy lab, third printing"))
    assert build.build(LAB, root=course.root), "texts may change under submissions"


@pytest.mark.parametrize(("late", "penalty"), [(0.0, None), (600.0, None), (DAY, 1.0), (DAY + 1, 2.0), (30 * DAY, 5.0)])
def test_each_day_begun_costs_a_tenth_and_never_more_than_half(late: float, penalty: float | None):
    assert PerDay().late_submission_penalty("ann", 10.0, late) == penalty


def test_a_hand_made_late_policy_can_be_configured(course: Course):
    config = course_config(course.root)
    config.PerDay.per_day = 0.25
    gradebook.register(course, LAB)
    with gradebook.opened(course) as book:
        book.find_assignment(LAB).duedate = datetime(2030, 5, 1)
        scores = dict.fromkeys(["ceil_div_check", "ceil_div_hidden"], 2.0)
        late = datetime(2030, 5, 1) + timedelta(hours=30)
        standing = gradebook.merge(book, LAB, "ann", scores, {}, late, config)
    assert (standing.penalty, standing.score) == (2.0, 2.0)


def test_a_build_is_what_nbgrader_itself_generates(course: Course, tmp_path):
    """Run by nbgrader's own command line, with the configuration file that it and the formgrader read."""
    command = [sys.executable, "-m", "nbgrader", "generate_assignment", LAB, "--create", "--force"]
    settings = {"root": course.root, "release_directory": tmp_path, "db_url": f"sqlite:///{tmp_path}/gradebook.db"}
    command += [f"--CourseDirectory.{key}={value}" for key, value in settings.items()]
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = os.environ | {"JUPYTER_CONFIG_PATH": str(ROOT / "grading"), "PYTHONPATH": str(ROOT), "PATH": path}
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    assert (tmp_path / LAB / f"{LAB}.ipynb").read_bytes() == course.release(LAB).read_bytes()


@pytest.mark.filterwarnings("ignore::sqlalchemy.exc.SAWarning")
def test_the_formgraders_own_autograde_is_the_robust_one(course: Course, tmp_path):
    """nbgrader's converter with our configuration alone, as its formgrader and command line run it."""
    from nbgrader.converters import Autograde

    gradebook.register(course, LAB)
    notebook = toy.solved(course)
    del notebook.cells[toy.at(notebook, "total_check")]
    toy.hand_in(course.root / "grading" / "submitted", "ann", notebook)
    convert(Autograde, course_config(course.root), LAB, "ann")
    with gradebook.opened(course) as book:
        assert gradebook.standing(book, LAB, "ann").score == 10.0
