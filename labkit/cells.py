"""Notebooks as lists of cells, run without Jupyter: how a lab is checked from its source, in a forked process.

The cells that a check needs are found by name: a cell is needed if it defines a name that a needed cell uses. So a
blanked or mutated cell runs only the checks that depend on it, and long demonstrations are left out.
"""

from __future__ import annotations

import ast
import asyncio
import contextlib
import faulthandler
import functools
import inspect
import io
import json
import linecache
import multiprocessing
import os
import re
import signal
import symtable
import sys
import traceback
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAX_TEXT = 100_000  # characters of output kept per cell: an endless print must not fill the memory
STAR = "*"  # stands among the defined names for those that `from m import *` brings, which nobody can know


@dataclass(frozen=True)
class Cell:
    """A code cell. `id` is its grade_id, or "cell<n>"; `points` is None for a cell that is not graded.

    is_locked: grading restores this cell from the release, so nothing in it is the student's.
    """

    id: str
    source: str
    points: float | None = None
    is_solution: bool = False
    is_locked: bool = False

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
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"{path} is not a readable notebook: {type(error).__name__}: {error}") from None


def _cell(number: int, raw: dict) -> Cell:
    meta = raw["metadata"].get("nbgrader") or {}
    source = raw["source"] if isinstance(raw["source"], str) else "".join(raw["source"])
    points = float(meta["points"]) if meta.get("grade") else None
    grade_id = str(meta.get("grade_id") or f"cell{number}")
    return Cell(grade_id, source, points, bool(meta.get("solution")), bool(meta.get("locked")))


@functools.lru_cache(maxsize=4096)
def names(source: str) -> tuple[frozenset[str], frozenset[str]]:
    """The global names that a cell defines or changes in place, and those it uses.

    `x[0] = 1` and `x.y = f` change x, so such a cell is needed wherever x is used; a mere method call is taken to
    change nothing. A cell that does not parse has neither.
    """
    source = plain_python(source)
    try:
        table, tree = symtable.symtable(source, "cell", "exec"), ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return frozenset(), frozenset()
    defined = {s.get_name() for s in table.get_symbols() if s.is_assigned() or s.is_imported()}
    used: set[str] = set()
    for node in outside_functions(tree):
        if isinstance(node, ast.Attribute | ast.Subscript) and isinstance(node.ctx, ast.Store):
            defined |= _base_name(node)
        elif isinstance(node, ast.AugAssign):
            used |= _base_name(node.target)
        elif isinstance(node, ast.ImportFrom) and node.names[0].name == "*":
            defined.add(STAR)
    pending = [table]
    while pending:
        scope = pending.pop()
        pending += scope.get_children()
        top = scope is table
        used |= {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (top or s.is_global())}
        defined |= {s.get_name() for s in scope.get_symbols() if s.is_assigned() and s.is_declared_global()}
    return frozenset(defined), frozenset(used)


def outside_functions(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that run when the cell does: not the bodies of functions, classes and lambdas."""
    pending = list(ast.iter_child_nodes(tree))  # no recursion: a sum of 1,500 terms is as deep as it is long
    while pending:
        node = pending.pop()
        yield node
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            pending += ast.iter_child_nodes(node)


def _base_name(node: ast.AST) -> set[str]:
    while isinstance(node, ast.Attribute | ast.Subscript):
        node = node.value
    return {node.id} if isinstance(node, ast.Name) else set()


def needed(cells: list[Cell], targets: Iterable[str]) -> list[Cell]:
    """The target cells and all cells before the last of them that they depend on by name, in notebook order.

    A cell between a function and its call counts too: the function may use what is defined only there.
    """
    wanted = set(targets)
    missing = wanted - {c.id for c in cells}
    if missing:
        raise KeyError(f"no cell with id {', '.join(sorted(missing))}")
    keep = {n for n, cell in enumerate(cells) if cell.id in wanted}
    candidates = set(range(max(keep, default=0))) - keep
    used = {STAR}.union(*(names(cells[n].source)[1] for n in keep))
    while found := {n for n in candidates if names(cells[n].source)[0] & used}:
        keep |= found
        candidates -= found
        used = used.union(*(names(cells[n].source)[1] for n in found))
    return [cells[n] for n in sorted(keep)]


def dependents(cells: list[Cell], changed: str) -> set[str]:
    """Questions whose graded cells depend by name on cell `changed` (its own included)."""
    graded = [c for c in cells if c.points is not None]
    return {c.question for c in graded if changed in {n.id for n in needed(cells, [c.id])}} | {changed}


# What IPython runs and Python cannot read: `%magic`, `!command`, `x = !command`, `name?`.
# Within one line, and each character in one way: a cell of many blank lines must not take minutes.
MAGIC = re.compile(r"^([ \t]*)(?:[%!].*|\?{0,2}[\w.]+\?{1,2}[ \t]*|\?{1,2}[\w.]+[ \t]*)$", re.MULTILINE)
ASSIGNED_MAGIC = re.compile(r"^([\w., \t]+=)[ \t]*[%!].*$", re.MULTILINE)
TIMING = ("%%time", "%%timeit", "%%capture")  # cell magics whose body is Python that runs here all the same


def plain_python(source: str) -> str:
    """A cell without IPython's magics: their lines become `pass`, what they assign None, another language's cell empty.

    Only a cell that is no Python as it stands is touched, so a line of a string that starts with % is safe.
    """
    if source.lstrip().startswith("%%"):
        magic, _, body = source.lstrip().partition("\n")
        return body if magic.split()[0] in TIMING else ""
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return MAGIC.sub(r"\1pass", ASSIGNED_MAGIC.sub(r"\1 None", source))
    return source


def run_cell(source: str, namespace: dict[str, Any], name: str) -> Any:
    """Run one cell and give the value of its last expression, as a notebook does.

    The source is entered in linecache: `@triton.jit` reads its function's source from there.
    """
    source, filename = plain_python(source), f"<cell {name}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if isinstance(last, ast.Expr):
        tree.body.pop()
    # dont_inherit: this file's own `from __future__` lines must not change what annotations mean in the notebook.
    _evaluated(compile(tree, filename, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True), namespace)
    if not isinstance(last, ast.Expr):
        return None
    last_value = compile(ast.Expression(last.value), filename, "eval", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT, True)
    return _evaluated(last_value, namespace)


def _evaluated(code: types.CodeType, namespace: dict[str, Any]) -> Any:
    """Run code that may await at its top level, as a notebook allows."""
    value = eval(code, namespace)
    return asyncio.run(value) if code.co_flags & inspect.CO_COROUTINE else value


@dataclass(frozen=True)
class Outcome:
    """What became of a cell: the value of its last expression if that is a plain number, what it printed, its error."""

    value: float | None
    text: str = ""
    error: str = ""


class _Said(io.StringIO):
    """What a cell prints, cut after MAX_TEXT characters."""

    def write(self, text: str) -> int:
        room = MAX_TEXT - self.tell()
        if room > 0:
            super().write(text if len(text) <= room else text[:room] + "\n... (output cut here)")
        return len(text)


def run_cells(
    cells: list[Cell], after: Callable[[Cell, dict[str, Any]], Outcome | None] | None = None
) -> dict[str, Outcome]:
    """Run cells one after another in a fresh namespace, going on after an error, as a grader does.

    after(cell, namespace): called after each cell that did not fail; an Outcome of its own replaces the cell's.
    """
    module = types.ModuleType("__main__")
    module.__dict__["display"] = lambda *args, **kwargs: None  # IPython has it built in, and nobody looks here
    outer = sys.modules["__main__"]
    sys.modules["__main__"] = module
    try:
        return {cell.id: _outcome(cell, module.__dict__, after) for cell in cells}
    finally:
        sys.modules["__main__"] = outer


def _outcome(cell: Cell, namespace: dict[str, Any], after: Callable | None) -> Outcome:
    said = _Said()
    try:
        with contextlib.redirect_stdout(said):
            value = run_cell(cell.source, namespace, cell.id)
            own = after(cell, namespace) if after else None
    except BaseException as error:  # a student's sys.exit must not end the grader
        return Outcome(None, said.getvalue(), "".join(traceback.format_exception_only(error)).strip())
    number = float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None
    return own or Outcome(number, said.getvalue())


def forked(work: Callable[[], Any], timeout: float) -> Any:
    """Run `work` in a forked process and give its result: a crash or a hang there costs nothing here.

    Modules already imported here are shared. The process has no terminal, reads nothing and prints nowhere, and what it
    started ends with it. Raises TimeoutError, or RuntimeError when the process died.
    """
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)

    def child() -> None:
        os.setsid()  # its own process group, so that whatever it starts can be ended with it
        receiver.close()
        null = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(null, stream)
        faulthandler.disable()  # pytest's would print this process's crash into the parent's output
        sys.stdin = open(0)  # noqa: SIM115  (the parent's may hold a terminal)
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
        raise RuntimeError(f"the process died ({_how(process.exitcode)})") from None
    finally:
        _end(process)
        receiver.close()


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    return signal.Signals(-code).name if code is not None and code < 0 else f"exit code {code}"


def _end(process: Any) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():  # killed before it had made its own group
        process.kill()
    process.join()
