"""A lab's notebook checked from its source, with no Jupyter package: each question in a forked process of its own.

What grading would restore is taken from the release first, so that an edited or deleted check cell changes nothing.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from labkit.cells import Cell, forked, names, needed, outside_functions, plain_python, read_cells, run_cells
from labkit.undrawn import stand_in


@dataclass(frozen=True)
class Verdict:
    """What the visible check of one question gave.

    status: "passed", "partial", "failed", "not solved" or "missing". hidden: points that only grading can give.
    """

    question: str
    status: str
    earned: float
    possible: float
    hidden: float
    said: str


@dataclass(frozen=True)
class Report:
    """The verdicts on a notebook, in its order, and the tier that proved them."""

    notebook: Path
    tier: str
    verdicts: tuple[Verdict, ...]

    @property
    def all_well(self) -> bool:
        """Whether every question that was checked earned all its points."""
        return all(v.status == "passed" for v in self.verdicts)


def graded_questions(cells: list[Cell]) -> list[str]:
    """The questions of a notebook by their check cells, in order."""
    return list(dict.fromkeys(c.question for c in cells if c.points is not None))


def restored(cells: list[Cell], release: list[Cell]) -> list[Cell]:
    """The student's cells with every locked cell as the release has it; a deleted one comes back in its place.

    What a student has written into one that is no check, an import say, runs after it as a cell of the student's own.
    """
    locked = {c.id: c for c in release if c.is_locked}
    result = []
    for cell in cells:
        given = locked.get(cell.id, cell)
        result.append(given)
        if given.points is None and given.source != cell.source:
            result.append(Cell(f"{cell.id}_edited", cell.source))
    for before, cell in zip([None, *release], release, strict=False):
        if cell.is_locked and cell not in result:
            result.insert(next((n + 1 for n, c in enumerate(result) if before and c.id == before.id), 0), cell)
    return result


def refusal(cells: list[Cell], question: str) -> str:
    """Why the answer to `question` earns nothing whatever it computes, or "": it reaches what the question forbids.

    Looked at: the solution cells that the answer depends on, by the rules of this question and of their own, and of the
    student's other cells those statements that define what it uses. So a scratch cell costs nobody a point, and a later
    cell that defines the answer anew counts. What the release says too, a second `import labkit` or a copy of the setup
    cell, is not the student's.
    """
    from labkit.checks import find_question, forbidden

    checked = f"{question}_check"
    cells = [replace(c, source=";".join(names(c.source)[1] - {"labkit"})) if c.id == checked else c for c in cells]
    release = {part.source for cell in cells if cell.is_locked for part in _split(cell)}
    parts = [part for cell in cells for part in _statements(cell) if part.is_locked or part.source not in release]
    used = [c for c in needed(parts, {question, checked} & {c.id for c in cells}) if c.id != checked]
    used = _with_touched(parts, used)
    context = "\n".join(plain_python(c.source) for c in used if c.is_locked)
    helpers = "".join(f"{c.source}\n" for c in used if not c.is_locked and not c.is_solution)
    rules, found = find_question(question), []
    for cell in (c for c in used if c.is_solution):
        own = find_question(cell.id)
        refused = {*rules.shipped, *rules.refused, *own.shipped, *own.refused}
        allowed = rules.allowed + own.allowed
        found += forbidden.violations(helpers + cell.source, tuple(refused), allowed, context)
    return "; ".join(dict.fromkeys(found))


def _with_touched(parts: list[Cell], used: list[Cell]) -> list[Cell]:
    """The used ones, those that put something into what these define, and what of the release the latter use."""
    found = touching(parts, used)
    if not found:
        return used
    wanted = {id(c) for c in [*used, *found]}
    uses = frozenset().union(*(names(c.source)[1] for c in found))
    return [c for c in parts if id(c) in wanted or (names(c.source)[0] & uses and c.is_locked)]


def touching(cells: list[Cell], used: list[Cell]) -> list[Cell]:
    """The student's other cells that put something into what the used ones of the student's define: `tools.append(f)`.

    By name alone such a cell defines nothing, so nothing seems to need it.
    """
    own = [c for c in used if not c.is_locked and not c.is_solution]
    helpers = frozenset().union(*(names(c.source)[0] for c in own))
    return [c for c in cells if c not in used and not c.is_locked and not c.is_solution and _puts_into(c, helpers)]


def _puts_into(cell: Cell, helpers: frozenset[str]) -> bool:
    """Whether it calls a method of one of these names, or `setattr` on it, for what the call does: also in a loop."""
    try:
        tree = ast.parse(plain_python(cell.source))
    except (SyntaxError, ValueError, RecursionError):
        return False
    for statement in outside_functions(tree):
        call = statement.value if isinstance(statement, ast.Expr) else None
        if isinstance(call, ast.Call):
            setter = isinstance(call.func, ast.Name) and call.func.id == "setattr" and call.args
            target = call.args[0] if setter else call.func if isinstance(call.func, ast.Attribute) else None
            while isinstance(target, ast.Attribute | ast.Subscript):
                target = target.value
            if isinstance(target, ast.Name) and target.id in helpers:
                return True
    return False


def _statements(cell: Cell) -> list[Cell]:
    """A cell that is neither locked nor an answer, in its parts; one that is, as it stands."""
    return [cell] if cell.is_locked or cell.is_solution else _split(cell)


def _split(cell: Cell) -> list[Cell]:
    """The cell as one for each statement and each imported module or name."""
    try:
        body = ast.parse(plain_python(cell.source)).body
    except (SyntaxError, ValueError, RecursionError):
        return [cell]
    single: list[ast.stmt] = []
    for statement in body:
        if isinstance(statement, ast.Import):
            single += [ast.Import([alias]) for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            single += [ast.ImportFrom(statement.module, [alias], statement.level) for alias in statement.names]
        else:
            single.append(statement)
    try:
        return [replace(cell, source=ast.unparse(s)) for s in single] or [cell]
    except RecursionError:  # a sum of a thousand terms
        return [cell]


def check_notebook(
    notebook: Path,
    release: Path | None = None,
    questions: list[str] | None = None,
    timeout: float = 300,
    progress: Callable[[str], None] = lambda question: None,
) -> Report:
    """Check the questions of a notebook, all of them or those named; `progress` is told each before it is run.

    release: the lab's release notebook, if it is at hand. timeout: seconds per question.
    ValueError for a broken notebook, KeyError for a question that it does not have.
    """
    from labkit import device
    from labkit.checks import find_question

    cells = read_cells(notebook)
    master = read_cells(release) if release else cells
    if release:
        cells = restored(cells, master)
    known = graded_questions(master)
    for question in [*known, *(questions or [])]:
        find_question(question)
    absent = set(questions or []) - set(known)
    if absent or not known:
        raise KeyError(f"{notebook} has no question {', '.join(sorted(absent))}" if absent else f"{notebook} is no lab")
    verdicts = []
    for question in questions or known:
        progress(question)
        verdicts.append(_check(cells, question, timeout))
    return Report(notebook, device.tier(), tuple(verdicts))


def _check(cells: list[Cell], question: str, timeout: float) -> Verdict:
    check_id = f"{question}_check"
    points = {c.id: c.points or 0.0 for c in cells if c.question == question and c.points is not None}
    possible, hidden = points.get(check_id, 0.0), points.get(f"{question}_hidden", 0.0)
    if not any(c.id == question and c.is_solution for c in cells):
        return Verdict(question, "missing", 0.0, possible, hidden, f"the notebook has no cell {question!r}")
    if said := refusal(cells, question):
        return Verdict(question, "failed", 0.0, possible, hidden, said)
    run = needed(cells, [question, check_id])
    run = needed(cells, [question, check_id, *(c.id for c in touching(cells, run))])
    try:
        outcomes = forked(lambda: (stand_in(), run_cells(run))[1], timeout)
    except (TimeoutError, RuntimeError) as error:
        return Verdict(question, "failed", 0.0, possible, hidden, str(error))
    answer, check = outcomes[question], outcomes[check_id]
    said = "\n".join(filter(None, (answer.error, check.text.strip(), check.error)))
    earned = min(max(check.value or 0.0, 0.0), possible)
    return Verdict(question, _status(earned, possible, said), earned, possible, hidden, said)


def _status(earned: float, possible: float, said: str) -> str:
    from labkit.checks.running import NOT_SOLVED

    if earned == possible:
        return "passed"
    if NOT_SOLVED in said:
        return "not solved"
    return "partial" if earned else "failed"
