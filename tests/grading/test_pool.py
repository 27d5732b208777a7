"""One process per submission: it may die or hang, and the others go on."""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import pytest

from grading.pool import run_all
from grading.worker import Graded, Job


def pretend(job: Job) -> None:
    """Stands in for grading: the student's name says what happens."""
    os.setsid()
    if job.student == "hangs":
        time.sleep(600)
    marker = job.folder.parent / "tried"
    if job.student == "dies" or (job.student == "dies_once" and not marker.exists()):
        marker.touch()
        os.abort()
    job.result_file.write_text(json.dumps(asdict(Graded(scores={"q_check": 1.0}))))


def jobs(tmp_path: Path, *students: str) -> list[Job]:
    return [Job(s, "lab", "", tmp_path, tmp_path / s, tmp_path / "none.db", {}) for s in students]


@pytest.fixture(scope="module")
def results(tmp_path_factory) -> dict[str, Graded]:
    made = jobs(tmp_path_factory.mktemp("pool"), "hangs", "dies", "dies_once", "fine", "fine_too")
    return {job.student: result for job, result in run_all(made, workers=2, seconds=8, target=pretend)}


def test_a_worker_that_died_is_tried_once_more(results):
    assert results["dies_once"].scores == {"q_check": 1.0} and not results["dies_once"].error


def test_a_worker_that_dies_twice_is_a_failure(results):
    assert "died twice" in results["dies"].error


def test_a_worker_that_hangs_is_killed_at_its_wall_clock(results):
    assert "no end after 8 s" in results["hangs"].error


def test_the_others_are_graded_meanwhile(results):
    assert [results[s].scores for s in ("fine", "fine_too")] == [{"q_check": 1.0}] * 2


def test_no_workers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="workers is 0"):
        next(run_all(jobs(tmp_path, "a"), workers=0, seconds=1))
