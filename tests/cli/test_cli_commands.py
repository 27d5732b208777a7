"""The command line as a whole: its help, how fast it answers, and what it says when something is not there."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import workspace
from tests.cli.toy import one_line

COMMANDS = ("doctor", "start", "check", "submit", "inspect", "models", "bench", "release", "build", "grade")
ROOT = Path(__file__).resolve().parents[2]


def test_help_names_every_command_and_nothing_that_is_not_there(camp):
    result = camp.run("--help")
    assert result.exit_code == 0
    listed = [line.split()[0] for line in result.stdout.partition("Commands:")[2].splitlines() if line.strip()]
    assert sorted(listed) == sorted(COMMANDS)


@pytest.mark.parametrize("command", [c for c in COMMANDS if c != "grade"])
def test_the_help_of_a_command_shows_an_example(camp, command):
    result = camp.run(command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout and f"\n    labkit {command}" in result.stdout.replace(
        "\n  labkit", "\n    labkit"
    )


def test_no_command_shows_the_help(camp):
    assert "Commands:" in camp.run().output


def test_an_unknown_command_or_option_is_refused(camp):
    for words in (["claims"], ["check", "lab1", "--ray"]):
        result = camp.run(*words)
        assert result.exit_code == 2 and "No such" in result.output


def test_help_imports_nothing_heavy():
    heavy = {"triton", "matplotlib", "nbgrader", "jupyterlab", "numpy", "rich"}
    if not Path("/dev/nvidiactl").exists():  # with a driver, torch is asked which tier it is
        heavy.add("torch")
    ask = f"import sys, labkit.cli; print(sorted({heavy!r} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_importing_labkit_picks_the_tier_before_triton_is_imported():
    ask = "import labkit, os, sys; print(os.environ.get('TRITON_INTERPRET'), 'triton' in sys.modules)"
    ask += "; print(labkit.device.tier())"
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-c", ask], capture_output=True, text=True, check=True, env=env)
    first, tier = done.stdout.split("\n")[:2]
    assert (first, tier) in (("1 False", "interpreter"), ("None False", "cuda"))


def test_labkit_gives_its_modules_and_says_which_it_has_not():
    import labkit

    assert labkit.models.ModelShape and labkit.check and labkit.score
    with pytest.raises(AttributeError, match="has no attribute 'nonsense'"):
        labkit.nonsense  # noqa: B018


@pytest.mark.parametrize("command", ["check", "submit", "start"])
def test_an_unknown_lab_is_one_line_that_names_the_labs(camp, command):
    one_line(camp.run(command, "lab9"), "no lab 'lab9'; there are: lab1_toy")


def test_a_lab_goes_by_its_slug_or_its_number(camp):
    for name in ("lab1_toy", "lab1", "1"):
        assert workspace.find_lab(name, camp.root) == "lab1_toy"
    for name in ("lab", "lab1_", "lab11", "toy", ""):
        with pytest.raises(workspace.CampError, match="no lab"):
            workspace.find_lab(name, camp.root)


@pytest.mark.parametrize("words", [["grade"], ["grade", "--help"], ["build"], ["build", "--check"], ["release", "x"]])
def test_the_instructors_commands_say_that_a_bundle_does_not_hold_them(camp, words):
    one_line(camp.run(*words), f"`labkit {words[0]}` needs grading/, which a student's bundle does not hold")


def test_the_instructors_commands_are_run_by_grading_and_its_exit_code_counts(camp):
    (camp.root / "grading").mkdir()
    (camp.root / "grading" / "__init__.py").touch()
    (camp.root / "grading" / "__main__.py").write_text("import sys, os; print(sys.argv[1:], os.getcwd()); sys.exit(7)")
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    for words in (
        ["grade", "submissions", "--workers", "2", "--help"],
        ["build", "lab1_toy", "--check"],
        ["release", "there"],
    ):
        run = "from pathlib import Path; from labkit import workspace"
        run += f"; workspace.camp_root = lambda: Path({str(camp.root)!r}); from labkit.cli import main; main()"
        done = subprocess.run([sys.executable, "-c", run, *words], capture_output=True, text=True, env=env)
        assert done.returncode == 7, done.stderr
        assert done.stdout.strip() == f"{words} {Path.cwd()}"


def test_a_folder_without_a_camp_is_one_line(camp, monkeypatch, tmp_path):
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(workspace, "labs_of", lambda root: [])
    one_line(camp.run("check", "lab1"), "no labs/ folder here or above")


def test_the_camp_is_found_from_a_folder_inside_it_when_labkit_lies_elsewhere(camp, monkeypatch):
    monkeypatch.undo()
    inside = camp.root / "some" / "folder"
    inside.mkdir(parents=True)
    monkeypatch.chdir(inside)
    real = workspace.labs_of
    monkeypatch.setattr(workspace, "labs_of", lambda root: [] if root == ROOT else real(root))
    assert workspace.camp_root() == camp.root


def test_a_folder_that_cannot_be_written_is_one_line(camp):
    (camp.root / "work").write_text("a file, not a folder")
    result = camp.run("start", "lab1")
    one_line(result, "Not a directory")
    assert str(camp.root / "work") in result.stderr


def test_bench_says_why_it_cannot_run(camp, monkeypatch):
    from labkit import benchmarks

    def run(names, json_path):
        raise RuntimeError(f"no CUDA device here for {names}")

    monkeypatch.setattr(benchmarks, "run", run, raising=False)
    one_line(camp.run("bench", "paged_attention"), "no CUDA device here for ['paged_attention']")


def test_bench_passes_the_kernels_and_the_file_on(camp, monkeypatch):
    from labkit import benchmarks

    seen = []
    monkeypatch.setattr(benchmarks, "run", lambda names, path: seen.append((names, path)), raising=False)
    assert camp.run("bench", "paged_attention", "--json", "x.json").exit_code == 0
    assert camp.run("bench").exit_code == 0
    assert seen == [(["paged_attention"], Path("x.json")), ([], None)]
