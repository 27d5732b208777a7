"""The house around the code: make, CI, and what is imported from outside."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]


def make(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["make", "--no-print-directory", *args], cwd=ROOT, capture_output=True, text=True)


def test_make_names_one_host_in_one_variable():
    text = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert [line.split()[0] for line in text.splitlines() if "://" in line] == ["TORCH_CPU_INDEX"]


def test_make_without_a_python_that_fits_says_so():
    done = make("setup", "PYTHON=")
    assert done.returncode and "no Python 3.11, 3.12 or 3.13 found" in done.stderr


def test_make_passes_options_through_and_every_gate_of_make_test_is_there():
    lab = make("-n", "lab", "LAB=lab1", "LAB_ARGS=--no-browser").stdout.splitlines()
    assert lab[-1] == ".venv/bin/labkit start lab1 --no-browser"
    gates = make("-n", "test", "PYTEST_ARGS=tests").stdout.splitlines()[-5:]
    assert [gate.removeprefix(".venv/bin/") for gate in gates] == [
        "ruff check",
        "ruff format --check",
        "mypy",
        "labkit build --check",
        "python -m pytest tests",
    ]


def test_ci_runs_make_test_and_is_sound_shell():
    script = ROOT / ".ci/run"
    assert subprocess.run(["bash", "-n", script]).returncode == 0
    text = script.read_text(encoding="utf-8")
    assert "set -euo pipefail" in text and text.rstrip().endswith("exec make -j2 test") and os.access(script, os.X_OK)


def test_ci_installs_what_is_missing_and_says_loudly_what_it_could_not(tmp_path):
    stubs = {"apt-get": f'echo "$@" >> {tmp_path}/apt', "make": 'echo "MADE $*, CI=$CI"', "id": "echo 0", "bwrap": ""}
    for name, body in stubs.items():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{body}\n")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "dirname").symlink_to(shutil.which("dirname") or "")
    command = [shutil.which("bash"), ROOT / ".ci/run"]
    done = subprocess.run(command, env={"PATH": str(tmp_path)}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "MADE -j2 test, CI=true\n"), done.stderr
    asked = (tmp_path / "apt").read_text().splitlines()
    assert asked[0].startswith("update") and asked[1].endswith("--no-install-recommends chromium"), asked
    assert done.stderr == "CI: NO chromium HERE, and it could not be installed: what needs it is not proved\n"


def test_what_is_imported_is_declared():
    project = declared()
    owners = metadata.packages_distributions()
    undeclared = set()
    for path in [p for folder in ("labkit", "kernels", "grading") for p in (ROOT / folder).rglob("*.py")]:
        for name in imported(path):
            dists = {canonicalize_name(dist) for dist in owners.get(name, [])}
            if name not in sys.stdlib_module_names and name not in ("labkit", "kernels", "grading") and dists:
                undeclared |= set() if dists & project else {f"{path.relative_to(ROOT)}: {name}"}
    assert undeclared == set(), "name these in pyproject.toml, then `make locks`"


def declared() -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    return {canonicalize_name(Requirement(requirement).name) for requirement in named}


def imported(path: Path) -> set[str]:
    """Top-level names of the absolute imports in a file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found
