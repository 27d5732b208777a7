"""What is found in a folder of submissions, and what is said about what cannot be used. Nothing is run here."""

from __future__ import annotations

import hashlib
import json
import unicodedata
import zipfile
from pathlib import Path

import pytest
import toy
from toy import LAB

from grading.clean import VALID_ID, clean_notebook
from grading.course import Course
from grading.places import Unusable
from grading.submissions import Submission, find_submissions


def zipped(path: Path, notebook: str, manifest: dict | None = None, name: str = f"{LAB}.ipynb") -> Path:
    """A submission as `labkit submit` writes it."""
    sums = {name: hashlib.sha256(notebook.encode()).hexdigest()}
    full = {
        "lab": LAB,
        "student": "ann",
        "camp_version": "0.1.0",
        "files": sums,
        "created": "2025-05-01T12:00:00+00:00",
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
def inbox(tmp_path: Path) -> Path:
    """An empty folder of submissions."""
    (tmp_path / "in").mkdir()
    return tmp_path / "in"


@pytest.fixture
def text(course: Course) -> str:
    return course.release(LAB).read_text()


def test_a_zip_of_labkit_submit_is_a_submission(inbox, course, text):
    zipped(inbox / f"ann-{LAB}.zip", text)
    found = only(inbox, course)
    assert (found.student, found.lab, found.problem, found.flags) == ("ann", LAB, "", [])
    assert str(found.submitted) == "2025-05-01 12:00:00"


def test_the_name_of_the_file_comes_before_what_the_manifest_claims(inbox, course, text):
    zipped(inbox / f"bob-{LAB}.zip", text, {"student": "ann"})
    found = only(inbox, course)
    assert found.student == "bob" and "by 'ann'" in "".join(found.flags)


def test_a_notebook_changed_after_its_manifest_is_called_tampered(inbox, course, text):
    zipped(inbox / f"ann-{LAB}.zip", text, {"files": {f"{LAB}.ipynb": "0" * 64}})
    assert any(flag.startswith("tampered") for flag in only(inbox, course).flags)


def test_of_several_submissions_the_newest_counts(inbox, course, text):
    zipped(inbox / "a" / f"ann-{LAB}.zip", text, {"created": "2025-05-02T00:00:00+02:00"})
    toy.hand_in(inbox, "a", text)
    found = only(inbox, course)
    assert found.source.suffix == ".zip" and "also handed in" in "".join(found.flags)


def test_a_broken_zip_is_a_problem_of_its_own(inbox, course):
    (inbox / f"ann-{LAB}.zip").write_bytes(b"PK\x03\x04 nothing more")
    assert "cannot be read" in only(inbox, course).problem


def test_a_zip_that_swells_is_refused(inbox, course, monkeypatch):
    monkeypatch.setattr("grading.places.MAX_BYTES", 10_000)
    with zipfile.ZipFile(inbox / f"ann-{LAB}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{LAB}.ipynb", "x" * 50_000)
    assert "over" in only(inbox, course).problem


@pytest.mark.parametrize("name", ["..", "a b", "-rf", "x" * 80])
def test_a_name_that_could_leave_the_folder_is_refused(inbox, course, text, name):
    zipped(inbox / "in.zip", text, {"student": name})
    assert "not a student's name" in only(inbox, course).problem


@pytest.mark.parametrize("name", ["张伟", "José", "Жанна.Д"])
def test_a_name_in_any_alphabet_is_a_students_however_its_accents_are_written(inbox, course, text, name):
    toy.hand_in(inbox, unicodedata.normalize("NFD", name), text)
    zipped(inbox / "in.zip", text, {"student": name})
    found = only(inbox, course)
    assert (found.student, found.problem) == (name, "") and "of 2 this one counts" in "".join(found.flags)


def test_what_holds_no_submission_gets_a_line(inbox, course, text):
    toy.hand_in(inbox, "ann", text)
    for name in ("bob/answers.7z", "carl/notes.txt", "dora.tar.gz", ".git/config", "__MACOSX/x", "roster.txt"):
        (inbox / name).parent.mkdir(exist_ok=True)
        (inbox / name).write_bytes(b"x")
    (inbox / "emil").mkdir()
    problems = {student: s.problem for student, s in named(inbox, course).items()}
    assert problems.keys() == {"ann", "bob", "carl", "dora", "emil"} and problems["ann"] == ""
    assert "there: answers.7z" in problems["bob"] and "dora.tar.gz is no zip file" in problems["dora"]


def test_a_link_is_not_followed(inbox, course, text):
    place = toy.hand_in(inbox, "ann", text)
    (place / f"{LAB}.ipynb").unlink()
    (place / f"{LAB}.ipynb").symlink_to("/etc/passwd")
    assert "is a link" in only(inbox, course).problem


def test_of_two_copies_of_the_notebook_none_is_guessed(inbox, course, text):
    for name in ("one.ipynb", "two.ipynb"):
        toy.hand_in(inbox, "ann", text, name=name)
    assert "one.ipynb, two.ipynb" in only(inbox, course).problem


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


def named(folder: Path, course: Course) -> dict[str, Submission]:
    return {found.student: found for found in find_submissions(folder, course, [LAB])}


@pytest.mark.parametrize("ids", [None, "", "an id", "same", 7, "x" * 80])
def test_cells_without_ids_of_their_own_get_some(inbox, course, text, ids):
    notebook = json.loads(text)
    for cell in notebook["cells"]:
        del cell["id"]
        if ids is not None:
            cell["id"] = ids
    toy.hand_in(inbox, "ann", json.dumps(notebook))
    found = only(inbox, course)
    assert found.problem == ""
    got = [cell["id"] for cell in json.loads(found.notebook)["cells"]]
    assert len(set(got)) == len(got) and all(VALID_ID.fullmatch(i) for i in got), got


def test_whatever_a_submission_raises_is_its_own_problem(inbox, course, text, monkeypatch):
    def clean(source: str):
        if "bomb" in source:
            raise MemoryError("out of it")
        return clean_notebook(source)

    monkeypatch.setattr("grading.submissions.clean_notebook", clean)
    toy.hand_in(inbox, "ann", text)
    toy.hand_in(inbox, "bob", "bomb")
    found = named(inbox, course)
    assert found["ann"].problem == "" and "MemoryError: out of it" in found["bob"].problem


def test_a_zip_with_a_broken_table_of_names_fails_alone(inbox, course, text):
    toy.hand_in(inbox, "bob", text)
    path = zipped(inbox / f"ann-{LAB}.zip", text)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("note_\u00e9.txt", "x")
    path.write_bytes(path.read_bytes().replace("note_\u00e9".encode(), b"note_\xff\xfe"))
    found = named(inbox, course)
    assert found["bob"].problem == "" and "cannot be read" in found["ann"].problem


def test_a_manifest_that_swells_is_refused(inbox, course, text):
    with zipfile.ZipFile(inbox / f"ann-{LAB}.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(f"{LAB}.ipynb", text)
        archive.writestr("manifest.json", b" " * 1_100_000)
    assert "manifest.json has over 1 MB" in only(inbox, course).problem


def test_what_is_read_of_one_submission_is_limited_as_a_whole(inbox, course, monkeypatch):
    monkeypatch.setattr("grading.places.MAX_BYTES", 10_000)
    for name in ("one.ipynb", "two.ipynb", "three.ipynb"):
        toy.hand_in(inbox, "ann", "x" * 4_000, name=name)
    assert "more than is read" in only(inbox, course).problem


def test_finders_own_files_are_not_there(inbox, course, text):
    path = inbox / "ann" / f"{LAB}.zip"
    path.parent.mkdir(parents=True)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"{LAB}/{LAB}.ipynb", text)
        archive.writestr(f"{LAB}/.DS_Store", b"\x00")
        archive.writestr(f"__MACOSX/{LAB}/._{LAB}.ipynb", b"\x00\x05\x16\x07Mac OS X\xff\xfe")
    found = only(inbox, course)
    assert (found.student, found.problem, found.flags) == ("ann", "", ["no readable manifest.json"])


@pytest.mark.parametrize("spelling", [LAB.upper(), LAB.replace("_", "-")])
def test_another_spelling_of_the_lab_is_taken_and_said(inbox, course, text, spelling):
    zipped(inbox / "x.zip", text, {"student": "ann", "lab": spelling})
    toy.hand_in(inbox, "bob", text).rename(inbox / "bob" / spelling)
    found = named(inbox, course)
    assert all(found[name].problem == "" for name in ("ann", "bob")), found
    assert all(repr(spelling) in "".join(found[name].flags) for name in ("ann", "bob")), found


@pytest.mark.parametrize("place", [f"ann/{LAB}.ipynb", f"ann/homework/{LAB}.ipynb"])
def test_a_notebook_that_lies_elsewhere_gets_a_line(inbox, course, text, place):
    (inbox / place).parent.mkdir(parents=True)
    (inbox / place).write_text(text)
    found = named(inbox, course)["ann"]
    assert found.lab == LAB and "lies where no submission is looked for" in found.problem


def test_a_zip_of_no_lab_gets_a_line(inbox, course):
    zipped(inbox / "ann.zip", "x", {"lab": "lab7"}, name="essay.ipynb")
    found = only(inbox, course)
    assert (found.student, found.lab) == ("ann", LAB) and "essay.ipynb" in found.problem


def test_a_folder_that_is_a_link_is_refused(inbox, course, text):
    place = toy.hand_in(inbox, "ann", text)
    (inbox / "bob").mkdir()
    (inbox / "bob" / LAB).symlink_to(place)
    found = named(inbox, course)
    assert found["ann"].problem == "" and "is a link" in found["bob"].problem


def test_a_newer_broken_zip_does_not_hide_the_good_one(inbox, course, text):
    zipped(inbox / "a.zip", text, {"created": "2025-05-01T00:00:00+00:00"})
    zipped(inbox / "b.zip", "{", {"created": "2025-05-02T00:00:00+00:00"})
    found = only(inbox, course)
    assert found.problem == "" and found.source.name == "a.zip"
    assert any("b.zip" in flag and "not readable" in flag for flag in found.flags), found.flags


def test_a_zip_of_another_name_that_claims_a_student_is_said_so(inbox, course, text):
    zipped(inbox / f"ann-{LAB}.zip", text, {"created": "2025-05-01T00:00:00+00:00"})
    zipped(inbox / "late.zip", text, {"created": "2025-05-02T00:00:00+00:00"})
    flags = "; ".join(only(inbox, course).flags)
    assert "this one counts: late.zip" in flags and "nothing but its manifest" in flags
    assert f"also handed in: ann-{LAB}.zip of 2025-05-01" in flags


def test_a_time_to_come_is_not_believed(inbox, course, text):
    zipped(inbox / f"ann-{LAB}.zip", text)
    zipped(inbox / "late.zip", text, {"created": "2099-01-01T00:00:00+00:00"})
    found = only(inbox, course)
    assert found.source.name == f"ann-{LAB}.zip" and "in the future" in "".join(found.flags)
    (inbox / f"ann-{LAB}.zip").unlink()
    alone = only(inbox, course)
    assert alone.submitted is None and any(f.startswith("tampered: made at 2099") for f in alone.flags)


def test_a_notebook_of_2014_gets_a_sentence():
    with pytest.raises(Unusable, match="nbformat 3: open it in Jupyter"):
        clean_notebook(json.dumps({"nbformat": 3, "worksheets": [{"cells": []}]}))


def test_half_a_character_anywhere_leaves_a_notebook_that_can_be_written():
    cell = {
        "cell_type": "code",
        "source": "x = '\ud800'",
        "metadata": {"nbgrader": {"grade_id": "q\ud800", "\ud800": 1}},
    }
    json.dumps(clean_notebook(json.dumps({"cells": [cell]})), ensure_ascii=False).encode("utf-8")
