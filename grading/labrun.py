"""Grades a lab's own solution, starter and mutants, each in a forked process: the grader that is itself graded."""

from __future__ import annotations

import contextlib
import io
import tomllib
import traceback
from dataclasses import dataclass, replace
from pathlib import Path

from grading.blackbox import Remote, find_mark, run_hidden
from labkit.cells import Cell, Outcome, forked, needed, read_cells, run_cell, run_cells
from labkit.labcheck import refusal

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Grade:
    """Points of one question, visible and hidden together, and everything that its checks said."""

    earned: float
    possible: float
    said: str


@dataclass(frozen=True)
class Mutant:
    """A named wrong answer: the question it answers, the whole cell, and what a check must say about it."""

    name: str
    question: str
    source: str
    message: str
    scores_zero: bool


def solution_cells(lab: str) -> list[Cell]:
    """Code cells of the solved notebook, hidden cells included."""
    return read_cells(ROOT / "solutions" / lab / f"{lab}.ipynb")


def starter_sources(lab: str) -> dict[str, str]:
    """Starter source of each solution cell, by question, from the release."""
    return {c.id: c.source for c in read_cells(ROOT / "labs" / lab / f"{lab}.ipynb") if c.is_solution}


def with_sources(cells: list[Cell], sources: dict[str, str]) -> list[Cell]:
    """The same cells with some sources replaced, by cell id."""
    return [replace(c, source=sources.get(c.id, c.source)) for c in cells]


def grade(cells: list[Cell], questions: list[str], timeout: float = 300) -> dict[str, Grade]:
    """Grade some questions of a notebook as an autograder would, in one forked process.

    A forbidden name in a cell that an answer depends on costs that question all its points, as it does in grading.
    """
    targets = [c.id for c in cells if c.points is not None and c.question in questions]
    run = needed(cells, targets)
    refused = {q: refusal(cells, q) for q in questions}
    try:
        outcomes = forked(lambda: run_cells(run, _hidden), timeout)
    except (TimeoutError, RuntimeError) as error:
        outcomes = _visible_only(cells, targets, str(error), timeout)
    return {q: _grade(run, q, outcomes, refused[q]) for q in questions}


def _visible_only(cells: list[Cell], targets: list[str], why: str, timeout: float) -> dict[str, Outcome]:
    """What the visible checks say on their own, where a hidden check may have ended the process."""
    died = {target: Outcome(None, error=why) for target in targets}
    checks = [target for target in targets if target.endswith("_check")]
    try:
        return died | forked(lambda: run_cells(needed(cells, checks)), timeout)
    except (TimeoutError, RuntimeError):
        return died


def _grade(cells: list[Cell], question: str, outcomes: dict[str, Outcome], refusal: str) -> Grade:
    graded = [c for c in cells if c.question == question and c.points is not None]
    possible = sum(c.points or 0 for c in graded)
    said = [refusal] if refusal else []
    for cell in [
        c for c in cells if c.question == question and c.id in outcomes
    ]:  # a crash leaves the graded ones only
        said += [outcomes[cell.id].text, outcomes[cell.id].error]
    earned = 0.0 if refusal else sum(outcomes[c.id].value or 0.0 for c in graded)
    return Grade(earned, possible, "\n".join(filter(None, said)))


def _hidden(cell: Cell, namespace: dict) -> Outcome | None:
    """Runs a hidden cell's black-box check through the same `Remote` as the autograder, on this process's namespace."""
    mark = find_mark(cell.source)
    if not mark:
        return None

    def execute(source: str) -> tuple[str, str]:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                run_cell(source, namespace, "blackbox")
        except BaseException as error:
            return said.getvalue(), "".join(traceback.format_exception_only(error)).strip()
        return said.getvalue(), ""

    verdict = run_hidden(*mark, Remote(execute))
    return Outcome((cell.points or 0.0) * verdict.fraction, verdict.message)


def mutants(lab: str) -> list[Mutant]:
    """The named wrong answers in tests/mutants/<lab>/<question>.toml. ValueError when one no longer applies."""
    solved = {c.id: c.source for c in solution_cells(lab) if c.is_solution}
    return [
        _mutant(path, entry, solved)
        for path in sorted((ROOT / "tests" / "mutants" / lab).glob("*.toml"))
        for entry in tomllib.loads(path.read_text(encoding="utf-8"))["mutant"]
    ]


def _mutant(path: Path, entry: dict, solved: dict[str, str]) -> Mutant:
    where, question = f"{path.name}: mutant {entry.get('name')!r}", path.stem
    if question not in solved:
        raise ValueError(f"{path.name}: the lab has no question {question!r}")
    missing = {"name", "message"} - set(entry) | (set() if "source" in entry else {"old", "new"} - set(entry))
    if missing:
        raise ValueError(f"{where} lacks {', '.join(sorted(missing))}")
    source = entry.get("source")
    if source is None:
        times = solved[question].count(entry["old"])
        if times != 1:
            raise ValueError(f"{where}: `old` stands {times} times in the solution, not once")
        source = solved[question].replace(entry["old"], entry["new"])
    if source.strip() == solved[question].strip():
        raise ValueError(f"{where} is the solution itself")
    return Mutant(entry["name"], question, source, entry["message"], entry.get("scores_zero", False))
