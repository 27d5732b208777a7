"""`labkit release`: the student's bundle holds no solution and no hidden check, and works."""

from __future__ import annotations

import ast
import functools
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from grading import release
from grading.release import bundle_files, write_bundle
from labkit.checks import questions_of

ROOT = Path(__file__).resolve().parents[2]
LAB = "lab1_paged_attention"


def lines_of(text: str) -> str:
    """Text with neither indentation, empty lines nor comments, so that moving code does not hide it."""
    kept = (line.strip() for line in text.splitlines())
    return "\n" + "\n".join(line for line in kept if line and not line.startswith("#")) + "\n"


@functools.cache
def secrets() -> tuple[tuple[str, str], ...]:
    """(where, lines) of every solution region of the sources and every function of the hidden checks."""
    return tuple(_secrets())


def _secrets() -> Iterator[tuple[str, str]]:
    for path in sorted((ROOT / "solutions").glob("*/*.nb.py")):
        for region in re.findall(r"### BEGIN SOLUTION\n(.*?)### END SOLUTION", path.read_text(), re.DOTALL):
            yield path.name, lines_of(region)
    for path in sorted((ROOT / "grading" / "hidden").rglob("*.py")):
        text = path.read_text()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef):
                yield f"{path.name}:{node.lineno}", lines_of("\n".join(map(str, map(ast.unparse, node.body))))


def contents(path: Path) -> str:
    """What a file says: the sources of a notebook's cells, the unparsed code of a module, else its text."""
    text = path.read_text(encoding="utf-8", errors="replace")
    if path.suffix == ".ipynb":
        return "\n".join("".join(cell["source"]) for cell in json.loads(text)["cells"])
    if path.suffix != ".py":
        return text
    try:
        return f"{text}\n{ast.unparse(ast.parse(text))}"
    except SyntaxError:  # a leak in a file that does not parse is one all the same
        return text


def leaks(bundle: Path, *only: Path) -> list[str]:
    """Which secret stands in which file of a bundle, in any of them or in those given.

    The production counterpart of an answer is in the bundle on purpose, refused in answers and hidden while grading: a
    single line may be the same there, since `return len(self._free)` can hardly be said otherwise.
    """
    shipped = {module.replace(".", "/") + ".py" for q in questions_of(LAB) for module in q.shipped}
    files = {p: lines_of(contents(p)) for p in only or bundle.rglob("*") if p.is_file()}
    found = []
    for path, text in files.items():
        name = path.relative_to(bundle).as_posix()
        found += [
            f"{where} in {name}:{s}"
            for where, s in secrets()
            if s in text and (s.count("\n") > 2 or name not in shipped)
        ]
        if path.suffix == ".ipynb":
            found += [f"{mark} in {name}" for mark in ("SOLUTION", "HIDDEN", "blackbox") if mark in text]
    return found


@pytest.fixture(scope="module")
def bundle(tmp_path_factory) -> Path:
    target = tmp_path_factory.mktemp("out") / "inference-camp"
    write_bundle(target)
    return target


def test_there_are_secrets_to_look_for():
    found = secrets()
    assert len(found) > 30 and all(len(lines.strip()) > 10 for _, lines in found)


def test_no_solution_and_no_hidden_check_is_in_the_bundle(bundle):
    assert leaks(bundle) == []


@pytest.mark.parametrize("name", ["labkit/extra.py", "README.md", f"labs/{LAB}/{LAB}.ipynb"])
def test_a_leak_would_be_found(bundle, tmp_path, name):
    leaky = tmp_path / "leaky"
    shutil.copytree(bundle, leaky)
    path = leaky / name
    for _, lines in (secrets()[3], secrets()[-1]):
        code = "".join(f"\n        {line}\n\n" for line in lines.strip().splitlines())
        if path.suffix == ".ipynb":
            notebook = json.loads(path.read_text())
            notebook["cells"][2]["source"] = code
            path.write_text(json.dumps(notebook))
        elif path.suffix == ".md":
            path.write_text(path.read_text() + code)
        else:
            path.write_text(f"class Copied:\n    def answer(self):\n        pass\n{code}")
        assert leaks(leaky, path), f"nobody noticed this in {name}:{lines}"


def test_the_bundle_holds_what_a_student_needs_and_nothing_of_the_instructors(bundle):
    tops = {p.name for p in bundle.iterdir()}
    assert {"labs", "labkit", "kernels", "locks", "Makefile", "pyproject.toml", "README.md", "LICENSE"} <= tops
    assert {"AGENTS.md", "CHANGELOG.md"} <= tops
    assert not tops & {"solutions", "grading", "tests", ".git", "work"}
    names = {p.name for p in bundle.rglob("*")}
    assert not names & {"conftest.py", "__pycache__", ".ipynb_checkpoints"}
    notebooks = {p.name for p in (bundle / "labs").rglob("*") if p.is_file()}
    assert notebooks == {f"{lab}.ipynb" for lab in release.labs()}


def test_no_link_of_the_bundles_pages_leads_nowhere(bundle):
    for page in [*bundle.glob("*.md"), *(bundle / "docs").glob("*.md")]:
        prose = re.sub(r"```.*?```|`[^`]*`", "", page.read_text(), flags=re.DOTALL)  # `kernel[grid](x)` is no link
        links = re.findall(r"\]\((?!\w+:|#)([^)#]+)", prose)
        dead = [link for link in links if not (page.parent / link).exists()]
        assert not dead, f"{page.name} links to what is not in the bundle: {', '.join(dead)}"


def labkit_in(bundle: Path, *words: str, **kwargs) -> subprocess.Popen:
    env = os.environ | {"PYTHONPATH": str(bundle), "COLUMNS": "200"}
    command = [sys.executable, "-m", "labkit.cli", *words]
    return subprocess.Popen(command, cwd=bundle, env=env, text=True, stdout=subprocess.PIPE, **kwargs)


def test_a_lab_is_checked_and_handed_in_from_the_bundle(bundle):
    mine = bundle / "work" / LAB / f"{LAB}.ipynb"
    mine.parent.mkdir(parents=True)
    shutil.copy(ROOT / "solutions" / LAB / f"{LAB}.ipynb", mine)
    try:
        process = labkit_in(bundle, "check", "lab1", "--question", "kv_bytes_per_token", "--json")
        report = json.loads(process.communicate(timeout=120)[0])
        assert process.returncode == 0 and report["all_well"] and report["notebook"] == str(mine)
        process = labkit_in(bundle, "submit", "lab1", "--student", "ada")
        assert "ada-lab1" in process.communicate(timeout=60)[0] and (bundle / f"ada-{LAB}.zip").is_file()
    finally:
        shutil.rmtree(bundle / "work")
        (bundle / f"ada-{LAB}.zip").unlink(missing_ok=True)


def test_a_lab_is_opened_from_the_bundle(bundle, tmp_path):
    with open(tmp_path / "log", "w") as log:
        process = labkit_in(bundle, "start", "lab1", "--work", str(tmp_path / "work"), "--no-browser", stderr=log)
    try:
        assert process.stdout
        url = next((u[0] for line in process.stdout if (u := re.search(r"http://127\S+", line))), None)
        assert url, (tmp_path / "log").read_text()
        base, token = url.split("/lab/")[0], url.partition("?token=")[2]
        api = f"{base}/api/contents/{LAB}/{LAB}.ipynb?content=0&token={token}"
        with urllib.request.urlopen(api) as answer:
            assert json.load(answer)["name"] == f"{LAB}.ipynb"
    finally:
        process.terminate()
        process.wait(30)
    copy = tmp_path / "work" / LAB / f"{LAB}.ipynb"
    assert copy.read_bytes() == (bundle / "labs" / LAB / f"{LAB}.ipynb").read_bytes()


@pytest.mark.parametrize("command", ["build", "grade", "release x"])
def test_the_instructors_commands_say_in_one_line_that_they_are_not_there(bundle, command):
    process = labkit_in(bundle, *command.split(), stderr=subprocess.PIPE)
    said = process.communicate(timeout=60)[1]
    assert process.returncode == 2 and said.count("\n") == 1
    assert "needs grading/, which a student's bundle does not hold" in said


@pytest.mark.parametrize("target", ["test", "lint", "check", "demo"])
def test_a_make_target_that_needs_the_whole_camp_says_so_before_it_sets_anything_up(bundle, target):
    done = subprocess.run(["make", target], cwd=bundle, capture_output=True, text=True, timeout=60)
    assert done.returncode != 0 and "a student's bundle does not hold" in done.stderr
    assert not (bundle / ".venv").exists()


# refusals


@pytest.fixture
def small_camp(tmp_path, monkeypatch) -> Path:
    """A camp of one file in every place, whose labs are up to date."""
    monkeypatch.setattr(release, "build", lambda lab, check_only: [])
    root = tmp_path / "camp"
    for name in (*release.FILES, *(f"{folder}/file.py" for folder in release.FOLDERS)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("x")
    return root


def test_an_empty_folder_is_filled(small_camp, tmp_path):
    (tmp_path / "out").mkdir()
    files = write_bundle(tmp_path / "out", small_camp)
    written = {p.relative_to(tmp_path / "out") for p in (tmp_path / "out").rglob("*") if p.is_file()}
    assert set(files) == written == set(bundle_files(small_camp))


def test_a_folder_that_is_not_empty_is_left_as_it_is(small_camp, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("x")
    for target in (tmp_path / "out", tmp_path / "out" / "mine"):
        with pytest.raises(ValueError, match="is not an empty folder"):
            write_bundle(target, small_camp)
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["mine"]


def test_the_bundle_is_not_written_into_its_own_sources(small_camp):
    with pytest.raises(ValueError, match="lies inside the camp's own labkit/"):
        write_bundle(small_camp / "labkit" / "out", small_camp)


def test_caches_and_the_labs_grader_stay_out(small_camp, tmp_path):
    for name in ("labs/conftest.py", "labs/.ipynb_checkpoints/x.ipynb", "labkit/__pycache__/x.pyc", "labkit/.secret"):
        (small_camp / name).parent.mkdir(exist_ok=True)
        (small_camp / name).write_text("x")
    names = {p.name for p in write_bundle(tmp_path / "out", small_camp)}
    assert not names & {"conftest.py", "x.ipynb", "x.pyc", ".secret"}


def test_a_file_that_is_missing_is_named_and_nothing_is_written(small_camp, tmp_path):
    (small_camp / "LICENSE").unlink()
    with pytest.raises(FileNotFoundError, match="LICENSE"):
        write_bundle(tmp_path / "out", small_camp)
    assert not (tmp_path / "out").exists()


def test_a_stale_notebook_is_not_released(small_camp, tmp_path, monkeypatch):
    stale = small_camp / "labs" / "lab.ipynb"
    monkeypatch.setattr(release, "build", lambda lab, check_only: [stale])
    monkeypatch.setattr(release, "labs", lambda: ["lab"])
    with pytest.raises(ValueError, match=r"out of date, run `labkit build` first: labs/lab\.ipynb"):
        write_bundle(tmp_path / "out", small_camp)
    assert not (tmp_path / "out").exists()
