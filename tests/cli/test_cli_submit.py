"""`labkit submit`: a zip file with a manifest, looked over before it is written."""

from __future__ import annotations

import hashlib
import json
import zipfile
from datetime import datetime

import pytest

import labkit
from labkit import workspace
from tests.cli.toy import LAB, SOLVED, one_line, toy_notebook


def test_the_zip_holds_the_work_and_a_manifest(camp, tmp_path):
    camp.write_mine(toy_notebook(SOLVED))
    result = camp.run("submit", "lab1", "--student", "ada", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    path = tmp_path / "out" / f"ada-{LAB}.zip"
    assert f"wrote {path}" in result.stdout
    with zipfile.ZipFile(path) as archive:
        assert sorted(archive.namelist()) == [f"{LAB}.ipynb", "manifest.json"]
        work, manifest = archive.read(f"{LAB}.ipynb"), json.loads(archive.read("manifest.json"))
    assert work == camp.mine.read_bytes()
    assert manifest["files"] == {f"{LAB}.ipynb": hashlib.sha256(work).hexdigest()}
    assert (manifest["lab"], manifest["student"], manifest["camp_version"]) == (LAB, "ada", labkit.__version__)
    assert datetime.fromisoformat(manifest["created"]).utcoffset() is not None
    assert set(manifest) == {"lab", "student", "camp_version", "files", "created"}


def test_data_files_of_the_release_go_along_and_others_are_named(camp):
    (camp.release.parent / "data").mkdir()
    (camp.release.parent / "data" / "trace.json").write_text("[1]")
    camp.write_mine(toy_notebook(SOLVED))
    (camp.mine.parent / "data").mkdir()
    (camp.mine.parent / "data" / "trace.json").write_text("[2]")
    (camp.mine.parent / "notes.txt").write_text("mine")
    result = camp.run("submit", "lab1", "--student", "ada")
    assert "left out, since the release has no such file: notes.txt" in result.stdout
    with zipfile.ZipFile(f"ada-{LAB}.zip") as archive:
        assert "data/trace.json" in archive.namelist() and "notes.txt" not in archive.namelist()


def test_what_is_not_answered_yet_is_said_and_does_not_stop_it(camp):
    camp.write_mine(
        toy_notebook({"double": SOLVED["double"], "triple": "def triple(x):\n    raise NotImplementedError"})
    )
    result = camp.run("submit", "lab1", "--student", "ada")
    assert result.exit_code == 0 and "not answered yet: triple" in result.stdout


def refused(camp, *words: str) -> None:
    """It refuses, says all of `words`, and writes nothing."""
    result = camp.run("submit", "lab1", "--student", "ada")
    assert result.exit_code == 2 and "Traceback" not in result.output
    for word in words:
        assert word in result.stderr, result.stderr
    assert not list(camp.root.parent.glob("*.zip"))


def test_a_missing_answer_or_check_cell_is_named(camp):
    camp.write_mine(toy_notebook(SOLVED, without=("triple", "double_check")))
    refused(camp, "cells gone", "double_check, triple", "--force submits in spite of it")


def test_a_cell_that_stands_twice_is_named(camp):
    notebook = json.loads(toy_notebook(SOLVED))
    notebook["cells"].append(notebook["cells"][1])
    camp.write_mine(json.dumps(notebook))
    refused(camp, "more than once", "double")


def test_a_broken_notebook_is_refused_and_can_be_forced(camp):
    camp.write_mine("{")
    refused(camp, "is not a readable notebook")
    result = camp.run("submit", "lab1", "--student", "ada", "--force")
    assert result.exit_code == 0 and "is not a readable notebook" in result.stdout
    assert zipfile.ZipFile(f"ada-{LAB}.zip").read(f"{LAB}.ipynb") == b"{"


def test_a_missing_file_of_the_release_is_named(camp):
    (camp.release.parent / "trace.json").write_text("[1]")
    camp.write_mine(toy_notebook(SOLVED))
    refused(camp, "trace.json of the release is missing")


def test_a_renamed_notebook_is_one_line(camp):
    camp.write_mine(toy_notebook())
    camp.mine.rename(camp.mine.with_name("mine.ipynb"))
    one_line(camp.run("submit", "lab1", "--student", "ada"), "was it renamed? There is: mine.ipynb")


@pytest.mark.parametrize("name", ["../ada", "a b", "", ".ada", "a" * 65, "ada/lab"])
def test_a_name_that_is_no_file_name_is_refused(camp, name, monkeypatch):
    monkeypatch.setattr(workspace.getpass, "getuser", lambda: "root")
    camp.write_mine(toy_notebook())
    assert camp.run("submit", "lab1", "--student", name).exit_code == 2


def test_the_account_names_the_student_unless_it_names_nobody(camp, monkeypatch):
    camp.write_mine(toy_notebook(SOLVED))
    monkeypatch.setattr(workspace.getpass, "getuser", lambda: "grace")
    assert f"grace-{LAB}.zip" in camp.run("submit", "lab1").stdout
    monkeypatch.setattr(workspace.getpass, "getuser", lambda: "jovyan")
    one_line(camp.run("submit", "lab1"), "whose work is this? Give --student NAME")
    monkeypatch.setenv("LABKIT_STUDENT", "ada")
    assert f"ada-{LAB}.zip" in camp.run("submit", "lab1").stdout


def test_submitting_again_replaces_the_zip(camp):
    for answers in (SOLVED, SOLVED | {"double": "def double(x): return x + x"}):
        camp.write_mine(toy_notebook(answers))
        assert camp.run("submit", "lab1", "--student", "ada").exit_code == 0
        with zipfile.ZipFile(f"ada-{LAB}.zip") as archive:
            assert archive.read(f"{LAB}.ipynb") == camp.mine.read_bytes()
