"""Notebooks as lists of cells, run without Jupyter: how a lab is checked from its source, in a forked process.

The cells that a check needs are found by name: a cell is needed if it defines a name that a needed cell uses. So a
blanked or mutated cell runs only the checks that depend on it, and long demonstrations are left out.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import io
import json
import linecache
import multiprocessing
import os
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BUILTINS = set(dir(builtins))


@dataclass(frozen=True)
class Cell:
    """A code cell. `id` is its grade_id, or "cell<n>"; `points` is None for a cell that is not graded."""

    id: str
    source: str
    points: float | None = None
    is_solution: bool = False

    @property
    def question(self) -> str:
        """The question this cell belongs to (its own id for a solution cell)."""
        return self.id.removesuffix("_check").removesuffix("_hidden")


def read_cells(path: Path) -> list[Cell]:
    """The code cells of a notebook file, read as JSON. ValueError with one sentence if it is not a notebook."""
    try:
        notebook = json.loads(Path(path).read_text(encoding="utf-8"))
        cells = [c for c in notebook["cells"] if c["cell_type"] == "code"]
        return [_cell(n, c) for n, c in enumerate(cells)]
    except (json.JSONDecodeError, UnicodeDecodeError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a readable notebook: {type(error).__name__}: {error}") from None


def _cell(number: int, raw: dict) -> Cell:
    meta = raw["metadata"].get("nbgrader") or {}
    source = raw["source"] if isinstance(raw["source"], str) else "".join(raw["source"])
    points = float(meta["points"]) if meta.get("grade") else None
    return Cell(meta.get("grade_id", f"cell{number}"), source, points, bool(meta.get("solution")))


def names(source: str) -> tuple[set[str], set[str]]:
    """The global names that a cell defines, and those it uses. A cell that does not parse has neither."""
    try:
        table = symtable.symtable(source, "cell", "exec")
    except SyntaxError:
        return set(), set()
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    used: set[str] = set()
    pending = [table]
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        top = scope is table
        used |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return defined, used - BUILTINS


def needed(cells: list[Cell], targets: Iterable[str]) -> list[Cell]:
    """The target cells and all earlier cells they depend on by name, in notebook order."""
    wanted = set(targets)
    missing = wanted - {c.id for c in cells}
    if missing:
        raise KeyError(f"no cell with id {', '.join(sorted(missing))}")
    used: set[str] = set()
    keep: list[Cell] = []
    for cell in reversed(cells):
        defines, uses = names(cell.source)
        if cell.id in wanted or defines & used:
            keep.append(cell)
            used |= uses
    return keep[::-1]


def dependents(cells: list[Cell], changed: str) -> set[str]:
    """Questions whose graded cells depend by name on cell `changed` (its own included)."""
    graded = [c for c in cells if c.points is not None]
    return {c.question for c in graded if changed in {n.id for n in needed(cells, [c.id])}} | {changed}


def run_cell(source: str, namespace: dict[str, Any], name: str) -> Any:
    """Run one cell and give the value of its last expression, as a notebook does.

    The source is entered in linecache: `@triton.jit` reads its function's source from there.
    """
    filename = f"<cell {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    tree = ast.parse(source, filename)
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, filename, "exec"), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval"), namespace) if last else None


@dataclass(frozen=True)
class Outcome:
    """What became of one cell: the value of its last expression if that is a plain number, what it printed, its error."""

    value: float | None
    text: str = ""
    error: str = ""


def run_cells(
    cells: list[Cell], after: Callable[[Cell, dict[str, Any]], Outcome | None] | None = None
) -> dict[str, Outcome]:
    """Run cells one after another in a fresh namespace, going on after an error, as a grader does.

    after(cell, namespace): called after each cell that did not fail; an Outcome of its own replaces the cell's.
    """
    module = types.ModuleType("__main__")
    sys.modules["__main__"] = module
    outcomes: dict[str, Outcome] = {}
    for cell in cells:
        said = io.StringIO()
        try:
            with contextlib.redirect_stdout(said):
                value = run_cell(cell.source, module.__dict__, cell.id)
                own = after(cell, module.__dict__) if after else None
            number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
            outcomes[cell.id] = own or Outcome(number, said.getvalue())
        except BaseException as error:  # a student's sys.exit must not end the grader
            line = "".join(traceback.format_exception_only(error)).strip()
            outcomes[cell.id] = Outcome(None, said.getvalue(), line)
    return outcomes


def forked(work: Callable[[], Any], timeout: float) -> Any:
    """Run `work` in a forked process and give its result: a crash or a hang there costs nothing here.

    Modules already imported here are shared. Raises TimeoutError, or RuntimeError when the process died.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        receiver.close()
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
            sender.send(work())
        sender.close()
        os._exit(0)  # skips the exit handlers of the parent, pytest's among them

    process = context.Process(target=child, daemon=False)
    process.start()
    sender.close()
    try:
        if not receiver.poll(timeout):
            raise TimeoutError(f"no result after {timeout:.0f} s")
        return receiver.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"the process died (exit code {process.exitcode})") from None
    finally:
        if process.is_alive():
            process.kill()
        process.join()
