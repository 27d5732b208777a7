"""`pytest labs/` grades every lab's own solution, starter, blanked cells and mutants, and the release itself.

Per question: `solution[q]` must earn all points, `starter[q]` none, `blank[q]` must be noticed when all other cells are
solved, and `mutant[q-name]` must lose points with its named message, in no question that does not depend on it.
"""

from __future__ import annotations

import os

os.environ["OMP_NUM_THREADS"] = "1"  # forked graders share the cores; a fork must not find threads running

os.environ.setdefault("MPLBACKEND", "agg")

import ast
import functools
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

import labkit
from grading import build, labrun
from labkit import device
from labkit.cells import dependents, names, read_cells
from labkit.doctor.findings import fits
from labkit.serve.recording import why_not_live

# Once, before the forks; after labkit. An optimizer of torch imports the last one when it is first used, in seconds.
for _module in ("triton", "ipywidgets", "matplotlib.pyplot", "labkit.widgets", "torch._dynamo"):
    importlib.import_module(_module)

ROOT = Path(__file__).resolve().parents[1]
NOTEBOOK_BYTES = 100_000
LIVE_S = 280.0
LIVE_CHILD = f"""
import json, sys
from pathlib import Path
from labkit.cells import Cell, forked, read_cells, run_cells
cells = [c for c in read_cells(Path(sys.argv[1])) if c.points is None]
outcomes = forked(lambda: run_cells([*cells, Cell("said", "print(verdicts)")]), {LIVE_S})
print(json.dumps([[name, outcome.error, outcome.text] for name, outcome in outcomes.items()]))
"""


def pytest_collect_file(file_path: Path, parent: pytest.Collector) -> pytest.File | None:
    if file_path.suffix == ".ipynb" and file_path.parent.parent == ROOT / "labs":
        return Lab.from_parent(parent, path=file_path)
    return None


def pytest_report_header() -> str:
    where = Path(labkit.__file__).parent
    return f"labs: grading the solutions with labkit {labkit.__version__} of {where}, tier {device.tier()}"


def pytest_terminal_summary(terminalreporter) -> None:
    if device.tier() != "cuda":
        count = sum(1 for r in terminalreporter.stats.get("passed", []) if r.nodeid.startswith("labs/"))
        terminalreporter.write_line(
            f"TIER: {count} lab items were proved in Triton's interpreter only; 0 on a GPU, because none is here."
        )


class Lab(pytest.File):
    """One release notebook and its solution."""

    def collect(self):
        self.lab = self.path.stem
        self.solved = labrun.solution_cells(self.lab)
        self.starters = labrun.starter_sources(self.lab)
        for name, run in META.items():
            yield Item.from_parent(self, name=f"meta[{name}]", run=functools.partial(run, self))
        for q in self.starters:
            yield Item.from_parent(self, name=f"solution[{q}]", run=functools.partial(self.solution, q))
            yield Item.from_parent(self, name=f"starter[{q}]", run=functools.partial(self.starter, q))
            yield Item.from_parent(self, name=f"blank[{q}]", run=functools.partial(self.blank, q))
        for m in labrun.mutants(self.lab):
            yield Item.from_parent(self, name=f"mutant[{m.question}-{m.name}]", run=functools.partial(self.mutant, m))

    @functools.cached_property
    def solution_grades(self) -> dict[str, labrun.Grade]:
        return labrun.grade(self.solved, list(self.starters))

    @functools.cached_property
    def starter_grades(self) -> dict[str, labrun.Grade]:
        return labrun.grade(labrun.with_sources(self.solved, self.starters), list(self.starters))

    def solution(self, q: str) -> None:
        grade = self.solution_grades[q]
        assert grade.earned == grade.possible, f"the solution earns {grade.earned} of {grade.possible}:\n{grade.said}"

    def starter(self, q: str) -> None:
        grade = self.starter_grades[q]
        assert grade.earned == 0, f"the unsolved starter earns {grade.earned} of {grade.possible}:\n{grade.said}"

    def blank(self, q: str) -> None:
        cells = labrun.with_sources(self.solved, {q: self.starters[q]})
        grades = labrun.grade(cells, sorted(dependents(cells, q)))
        assert grades[q].earned < grades[q].possible, f"no check notices that {q} is blank:\n{grades[q].said}"

    def mutant(self, m: labrun.Mutant) -> None:
        cells = labrun.with_sources(self.solved, {m.question: m.source})
        grades = labrun.grade(cells, sorted(dependents(cells, m.question)))
        own = grades.pop(m.question)
        assert own.earned < own.possible, f"the wrong answer earns full marks:\n{own.said}"
        assert re.search(m.message, own.said), f"no check says {m.message!r}:\n{own.said}"
        assert not (m.scores_zero and own.earned), f"it must score 0, and scores {own.earned}:\n{own.said}"


def no_leak(lab: Lab) -> None:
    text = lab.path.read_text(encoding="utf-8")
    for mark in ("BEGIN SOLUTION", "HIDDEN TESTS", "blackbox"):
        assert mark not in text, f"{lab.path.name} holds {mark!r}: a solution or a hidden check leaked"


def ids_equal(lab: Lab) -> None:
    def ids(path: Path) -> list[str]:
        cells = nbformat.read(path, 4).cells
        return [c.metadata.nbgrader.grade_id for c in cells if "nbgrader" in c.metadata]

    solved = ROOT / "solutions" / lab.lab / f"{lab.lab}.ipynb"
    assert ids(lab.path) == ids(solved), "the release and the solution differ in their ids: run `labkit build`"


def up_to_date(lab: Lab) -> None:
    drifted = [str(p.relative_to(ROOT)) for p in build.build(lab.lab, check_only=True)]
    assert not drifted, f"out of date, run `labkit build`: {', '.join(drifted)}"


def no_outputs(lab: Lab) -> None:
    assert not any(c.get("outputs") for c in nbformat.read(lab.path, 4).cells), "the release holds outputs"


def small(lab: Lab) -> None:
    size = lab.path.stat().st_size
    assert size < NOTEBOOK_BYTES, f"{lab.path.name} has {size} bytes, {NOTEBOOK_BYTES} is the limit"


def functions_keep_their_names(lab: Lab) -> None:
    """A cell that is run again must find what an earlier one defined, also after the cells that follow it."""
    cells = [cell for cell in read_cells(lab.path) if cell.source.strip()]
    trees = [ast.parse(cell.source).body for cell in cells]
    for tree, cell in zip(trees, cells, strict=True):
        own = {node.name for node in tree if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for other in cells:
            lost = own & names(other.source)[0] if other is not cell else set()
            assert not lost, f"the name of a function becomes something else: {lost} in\n{other.source}"


def live(lab: Lab) -> None:
    """Every cell of the solution of a lab that has a tier with vLLM, on a server that is really started."""
    if "vllm" not in next(row["tiers"] for row in fits()["lab"] if row["slug"] == lab.lab):
        return
    reason = why_not_live()
    assert not reason, f"nothing was proved on a live server: {reason}"
    # In a process of its own: an engine sets torch's threads, which fails in a fork of a process that has set them.
    command = [sys.executable, "-c", LIVE_CHILD, str(ROOT / "solutions" / lab.lab / f"{lab.lab}.ipynb")]
    done = subprocess.run(
        command,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIVE_S + 15,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    outcomes = json.loads(done.stdout.splitlines()[-1])
    failed = {name: error for name, error, _ in outcomes if error}
    assert not failed, f"cells that failed on a live server: {failed}"
    said = "\n".join(text for _, _, text in outcomes)
    assert "ready after" in said and "No server here" not in said, f"no server was started:\n{said}"
    assert "[refuted]" in said, f"the claims were not tried:\n{said[-2000:]}"
    unsolved = re.findall(r"solve (?:the )?question.*|nothing to show.*|\[ *open\].*\n.*", said)
    assert not unsolved, f"the solution did not do what a cell asks for: {unsolved}"


META = {f.__name__: f for f in (up_to_date, ids_equal, no_leak, no_outputs, small, functions_keep_their_names, live)}


class Item(pytest.Item):
    """One named check of a lab."""

    def __init__(self, *, run, **kwargs):
        super().__init__(**kwargs)
        self._run = run

    def runtest(self) -> None:
        self._run()

    def repr_failure(self, excinfo):
        return str(excinfo.value) if excinfo.errisinstance(AssertionError) else super().repr_failure(excinfo)

    def reportinfo(self):
        return self.path, 0, f"{self.parent.path.stem}::{self.name}"
