"""`labkit start`: nobody's work is lost, and JupyterLab gets what it should."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from labkit import jupyter, workspace
from tests.cli.toy import LAB, SOLVED, one_line, toy_notebook


@pytest.fixture
def served(camp, monkeypatch) -> list:
    """What JupyterLab would have been started with."""
    calls: list = []
    monkeypatch.setattr(jupyter, "serve", lambda *words: calls.append(words) or 0)
    monkeypatch.setattr(jupyter, "is_installed", lambda: True)
    return calls


def test_the_first_start_copies_the_release(camp, served):
    result = camp.run("start", "lab1")
    assert result.exit_code == 0 and f"copied {LAB}.ipynb" in result.stdout
    assert camp.mine.read_bytes() == camp.release.read_bytes()
    assert served[0][:2] == (camp.mine, camp.root / "work")


def test_work_that_is_there_is_kept_and_it_says_so(camp, served):
    camp.run("start", "lab1")
    camp.write_mine(toy_notebook(SOLVED))
    result = camp.run("start", "lab1")
    assert f"kept your {camp.mine}" in result.stdout and "newer release" not in result.stdout
    assert camp.mine.read_text() == toy_notebook(SOLVED)
    assert [p.name for p in camp.mine.parent.glob("*.ipynb")] == [f"{LAB}.ipynb"]


def test_a_newer_release_is_put_beside_the_work_once(camp, served):
    camp.run("start", "lab1")
    camp.write_mine(toy_notebook(SOLVED))
    camp.release.write_text(toy_notebook(extra="y = 2"))
    beside = camp.mine.with_name(f"{LAB}.new.ipynb")

    result = camp.run("start", "lab1")
    assert f"a newer release of it is beside it: {LAB}.new.ipynb" in result.stdout
    assert beside.read_bytes() == camp.release.read_bytes()
    assert camp.mine.read_text() == toy_notebook(SOLVED)

    beside.unlink()
    assert "newer release" not in camp.run("start", "lab1").stdout, "what the student threw away comes back"
    assert not beside.exists()


def test_an_untouched_new_release_makes_room_for_the_next_but_an_edited_one_does_not(camp, served):
    camp.run("start", "lab1")
    camp.write_mine(toy_notebook(SOLVED))
    beside, second = (camp.mine.with_name(f"{LAB}.{end}.ipynb") for end in ("new", "new2"))
    for text in ("y = 2", "y = 3"):
        camp.release.write_text(toy_notebook(extra=text))
        camp.run("start", "lab1")
        assert beside.read_bytes() == camp.release.read_bytes() and not second.exists()
    beside.write_text(toy_notebook(SOLVED, extra="my work in the new one"))
    camp.release.write_text(toy_notebook(extra="y = 4"))
    assert f"{LAB}.new2.ipynb" in camp.run("start", "lab1").stdout
    assert "my work in the new one" in beside.read_text()
    assert second.read_bytes() == camp.release.read_bytes()


@pytest.mark.parametrize("record", [None, "", "{", "[]", '{"a": 1}'])
def test_a_lost_record_never_costs_work(camp, served, record):
    camp.write_mine(toy_notebook(SOLVED))
    if record is not None:
        (camp.mine.parent / workspace.RECORD).write_text(record)
    result = camp.run("start", "lab1")
    assert result.exit_code == 0 and "a newer release" in result.stdout
    assert camp.mine.read_text() == toy_notebook(SOLVED)


def test_other_files_of_a_lab_come_along_and_caches_do_not(camp, served):
    folder = camp.release.parent
    for name in ("data/trace.json", ".ipynb_checkpoints/x.ipynb", "__pycache__/x.pyc"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text("1")
    camp.run("start", "lab1")
    files = {str(p.relative_to(camp.mine.parent)) for p in camp.mine.parent.rglob("*") if p.is_file()}
    assert files == {f"{LAB}.ipynb", "data/trace.json", workspace.RECORD}


def test_the_release_is_never_edited(camp, served):
    before = camp.release.read_bytes()
    one_line(camp.run("start", "lab1", "--work", str(camp.root / "labs")), "work outside of labs/")
    assert [p.name for p in camp.release.parent.iterdir()] == [f"{LAB}.ipynb"]
    assert camp.release.read_bytes() == before


def test_without_a_lab_the_one_last_worked_on_is_opened(camp, served):
    other = camp.root / "labs" / "lab2_toy" / "lab2_toy.ipynb"
    other.parent.mkdir()
    other.write_text(toy_notebook())
    camp.run("start")
    camp.run("start", "lab2")
    os.utime(camp.mine, (2e9, 2e9))
    camp.run("start")
    os.utime(camp.root / "work" / "lab2_toy" / "lab2_toy.ipynb", (3e9, 3e9))
    camp.run("start")
    assert [call[0].stem for call in served] == [LAB, "lab2_toy", LAB, "lab2_toy"]


@pytest.mark.parametrize(
    ("words", "options"),
    [
        (["lab1", "--no-browser", "--port", "9000"], ["--no-browser", "--port", "9000"]),
        (["--no-browser"], ["--no-browser"]),
        (["--port=9000", "--work", "elsewhere"], ["--port=9000"]),
    ],
)
def test_other_options_go_to_jupyterlab(camp, served, words, options):
    assert camp.run("start", *words).exit_code == 0
    assert served[0][3] == options


def test_without_jupyterlab_the_copy_is_made_and_one_line_says_what_to_do(camp, monkeypatch):
    monkeypatch.setattr(jupyter, "is_installed", lambda: False)
    one_line(camp.run("start", "lab1"), "JupyterLab is not installed here: `make lab` installs it")
    assert camp.mine.is_file()


def test_jupyterlabs_exit_code_is_the_commands(camp, monkeypatch):
    monkeypatch.setattr(jupyter, "is_installed", lambda: True)
    monkeypatch.setattr(jupyter, "serve", lambda *words: 3)
    assert camp.run("start", "lab1").exit_code == 3


def test_jupyterlab_stays_on_this_machine_and_behind_a_token(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_TOKEN", "")
    monkeypatch.setenv("JUPYTER_CONFIG_PATH", "/mine")
    command = jupyter.command(tmp_path / "lab" / "lab.ipynb", tmp_path, ["--no-browser"])
    assert "--ServerApp.ip=127.0.0.1" in command and f"--ServerApp.root_dir={tmp_path}" in command
    assert "--LabApp.default_url=/lab/tree/lab/lab.ipynb" in command and command[-1] == "--no-browser"
    env = jupyter.environment(tmp_path)
    assert len(env["JUPYTER_TOKEN"]) >= 40
    assert env["JUPYTER_CONFIG_PATH"] == f"{jupyter.PROFILE}{os.pathsep}/mine"


def test_a_camp_that_is_not_installed_can_be_imported_by_its_notebooks(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTHONPATH", raising=False)
    assert "PYTHONPATH" not in jupyter.environment(tmp_path)
    package = jupyter.PROFILE.parents[2]
    assert jupyter.environment(package)["PYTHONPATH"] == str(package)


def test_the_profile_is_json_and_switches_the_instructors_tools_off():
    page = json.loads((jupyter.PROFILE / "labconfig" / "page_config.json").read_text())["disabledExtensions"]
    server = json.loads((jupyter.PROFILE / "jupyter_server_config.json").read_text())["ServerApp"][
        "jpserver_extensions"
    ]
    for name in ("formgrader", "course-list", "create-assignment", "validate-assignment"):
        assert page[f"@jupyter/nbgrader:{name}"] is True
    assert server == {
        f"nbgrader.server_extensions.{n}": False for n in ("course_list", "formgrader", "validate_assignment")
    }


def test_a_jupyterlab_that_ends_at_once_leaves_no_address(tmp_path, monkeypatch):
    said: list[str] = []
    monkeypatch.setattr(jupyter, "command", lambda *words: ["false"])
    assert jupyter.serve(tmp_path / "lab.ipynb", tmp_path, tmp_path, [], said.append) == 1
    assert said == []


def test_the_record_of_a_killed_server_with_the_same_process_number_is_not_taken_for_ours(tmp_path, monkeypatch):
    monkeypatch.setenv("JUPYTER_RUNTIME_DIR", str(tmp_path))
    record = tmp_path / "jpserver-7.json"
    record.write_text('{"url": "http://127.0.0.1:1/", "token": "old"}')
    ours = '{"url": "http://127.0.0.1:2/", "token": "new"}'
    polls = iter([None] * 3)

    class Process:
        pid = 7

        def poll(self):
            if next(polls, "written") == "written" and not record.exists():
                record.write_text(ours)

    assert jupyter._wait_for_url(Process(), Path("a.ipynb")) == "http://127.0.0.1:2/lab/tree/a.ipynb?token=new"
