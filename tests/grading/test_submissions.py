"""What is found in a folder of submissions, and what is said about what cannot be used. Nothing is run here."""

from __future__ import annotations

import hashlib
import json
import zipfile
from pathlib import Path

import pytest
import toy
from toy import LAB

from grading.course import Course
from grading.submissions import Submission, Unusable, clean_notebook, find_submissions


def zipped(path: Path, notebook: str, manifest: dict | None = None, name: str = f"{LAB}.ipynb") -> Path:
    """A submission as `labkit submit` writes it."""
    sums = {name: hashlib.sha256(notebook.encode()).hexdigest()}
    full = {
        "lab": LAB,
        "student": "ann",
        "camp_version": "0.1.0",
        "files": sums,
        "created": "2030-05-01T12:00:00+00:00",
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, notebook)
        archive.writestr("manifest.json", json.dumps(full | (manifest or {})))
    return path


def only(folder: Path, course: Course) -> Submission:
    found = find_submissions(folder, course, [LAB])
    assert len(found) == 1, found
    return found[0]


@pytest.fixture
def text(course: Course) -> str:
    return course.release(LAB).read_text()


def test_a_zip_of_labkit_submit_is_a_submission(tmp_path, course, text):
    zipped(tmp_path / "in" / f"ann-{LAB}.zip", text)
    found = only(tmp_path / "in", course)
    assert (found.student, found.lab, found.problem, found.flags) == ("ann", LAB, "", [])
    assert str(found.submitted) == "2030-05-01 12:00:00"


def test_the_name_of_the_file_comes_before_what_the_manifest_claims(tmp_path, course, text):
    zipped(tmp_path / "in" / f"bob-{LAB}.zip", text, {"student": "ann"})
    found = only(tmp_path / "in", course)
    assert found.student == "bob" and "by 'ann'" in "".join(found.flags)


def test_a_notebook_changed_after_its_manifest_is_called_tampered(tmp_path, course, text):
    zipped(tmp_path / "in" / f"ann-{LAB}.zip", text, {"files": {f"{LAB}.ipynb": "0" * 64}})
    assert any(flag.startswith("tampered") for flag in only(tmp_path / "in", course).flags)


def test_of_several_submissions_the_newest_counts(tmp_path, course, text):
    zipped(tmp_path / "in" / "a" / f"ann-{LAB}.zip", text, {"created": "2030-05-02T00:00:00+02:00"})
    toy.hand_in(tmp_path / "in", "a", text)
    found = only(tmp_path / "in", course)
    assert found.source.suffix == ".zip" and "also handed in" in "".join(found.flags)


def test_a_broken_zip_is_a_problem_of_its_own(tmp_path, course):
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / f"ann-{LAB}.zip").write_bytes(b"PK\x03\x04 nothing more")
    assert "cannot be read" in only(tmp_path / "in", course).problem


def test_a_zip_that_swells_is_refused(tmp_path, course, monkeypatch):
    monkeypatch.setattr("grading.submissions.MAX_BYTES", 10_000)
    with zipfile.ZipFile(tmp_path / f"ann-{LAB}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{LAB}.ipynb", "x" * 50_000)
    assert "over" in only(tmp_path, course).problem


@pytest.mark.parametrize("name", ["..", "a b", "-rf", "x" * 80])
def test_a_name_that_could_leave_the_folder_is_refused(tmp_path, course, text, name):
    zipped(tmp_path / "in.zip", text, {"student": name})
    assert "not a student's name" in only(tmp_path, course).problem


def test_a_link_is_not_followed(tmp_path, course, text):
    place = toy.hand_in(tmp_path / "in", "ann", text)
    (place / f"{LAB}.ipynb").unlink()
    (place / f"{LAB}.ipynb").symlink_to("/etc/passwd")
    assert "is a link" in only(tmp_path / "in", course).problem


def test_of_two_copies_of_the_notebook_none_is_guessed(tmp_path, course, text):
    for name in ("one.ipynb", "two.ipynb"):
        toy.hand_in(tmp_path / "in", "ann", text, name=name)
    assert "one.ipynb, two.ipynb" in only(tmp_path / "in", course).problem


def test_a_folder_that_is_none_is_said_so(tmp_path, course):
    with pytest.raises(ValueError, match="not a folder of submissions"):
        find_submissions(tmp_path / "nowhere", course, [LAB])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"cells": 3}',
        '{"cells": [null]}',
        '{"cells": [{"cell_type": "code", "source": 7}]}',
        "<<<<<<< HEAD\n{}",
    ],
)
def test_what_is_no_notebook_is_unusable(text):
    with pytest.raises(Unusable, match="not readable"):
        clean_notebook(text)


def test_only_ids_types_sources_and_nbgrader_metadata_survive_cleaning():
    cell = {
        "cell_type": "code", "id": "a", "source": ["x = 1\n", "y = 2"], "outputs": [{"output_type": "rubbish"}],
        "metadata": {"tags": ["skip-execution"], "timeout": 10**9, "nbgrader": {"grade_id": "q", "points": 2}},
    }  # fmt: skip
    kept = clean_notebook(json.dumps({"cells": [cell], "metadata": {"x": 1}})).cells[0]
    assert kept.source == "x = 1\ny = 2" and kept.outputs == []
    assert kept.metadata == {"nbgrader": {"grade_id": "q", "points": 2}}
