"""Runs one submitted notebook: a crash, a hang or a cheat costs the question it happened in, and no other.

The cells run in order in one sandboxed kernel. When it dies, hangs or stops telling the truth, the cell at fault is
left out, a new kernel gets the cells that the remaining questions need by name, and the run goes on, until the
notebook's wall clock is up. Hidden checks come last, in a kernel of their own that gets such cells too and has no
visible checks in it: these compute what is to come out, so whoever reaches them need not answer.
"""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable
from dataclasses import dataclass

from nbformat import NotebookNode
from nbformat.v4 import new_output

from grading.blackbox import Remote, find_mark, run_hidden
from grading.canary import Canary, tier
from grading.checkcell import earned, make_plain, run_check
from grading.incidents import Incident, Report
from grading.kernel_state import hooks_aside, hooks_back, keep_names, restore_names
from grading.session import TIMEOUT, KernelLost, Session, failure
from labkit.cells import Cell, needed, plain_python
from labkit.labcheck import refusal, touching

AGAIN = 3.0  # seconds for a cell that had no end before: what stands above its endless loop is defined by then


@dataclass(frozen=True)
class Clock:
    """Seconds for one cell without a limit of its own, the most for any cell, and for the whole notebook.

    The last quarter is kept for the hidden checks, so that an endless cell does not cost what was earned before it;
    their kernel starts on time of its own.
    """

    cell: float = 60.0
    longest: float = 600.0
    notebook: float = 1200.0
    start: float = 10.0


class NotebookRun:
    """One run over a notebook whose cells RepairCells has put in order. Outputs land in the cells."""

    def __init__(
        self, cells: list[NotebookNode], lab: str, start: Callable[[bool], Session], clock: Clock, release: set[str]
    ):
        """release: sources of the release's cells, which no student wrote.

        start: makes a fresh kernel, in which the lab's visible checks can be imported or not.
        """
        self.code = [c for c in cells if c.cell_type == "code"]
        self.lab, self.clock = lab, clock
        self.report = Report()
        self._start = start
        self._session: Session | None = None
        self._canary: Canary | None = None
        self._with_checks = True
        self._modules: list[str] = []  # those that the canary looks at
        self._deadline = time.monotonic() + 0.75 * clock.notebook
        self._cells = [_analysed(n, cell) for n, cell in enumerate(self.code)]
        self._written = {c.id for c in self._cells if c.is_solution or not (c.is_locked or c.source in release)}
        self._hidden = [n for n, c in enumerate(self._cells) if c.points is not None and find_mark(self.code[n].source)]
        self._pending = {c.id for c in self._cells if c.points is not None}
        self._banned: set[str] = set()
        self._hung: set[str] = set()
        self._lost: dict[str, NotebookNode] = {}  # question -> why it gets no points

    def run(self) -> Report:
        """Run everything. Never raises for what a student did."""
        self._refuse()
        try:
            for n in range(len(self._cells)):
                if n not in self._hidden:
                    self._step(n, n)
            self._stop()
            self._with_checks = False
            self._deadline += 0.25 * self.clock.notebook + self.clock.start
            for n in self._hidden:
                self._step(n, len(self._cells))
        finally:
            self._stop()
        for n, cell in enumerate(self._cells):
            if cell.points is not None and cell.question in self._lost:
                self.code[n].outputs = [copy.deepcopy(self._lost[cell.question])]
        self._suspect()
        return self.report

    def _refuse(self) -> None:
        for question in dict.fromkeys(c.question for c in self._cells if c.points is not None):
            reason = refusal(self._cells, question)
            if reason:
                readable = all(_reads(c.source) for c in self._cells if c.id == question)
                self._note("refused" if readable else "unreadable", question, reason)
                self._lost[question] = failure("Refused", reason)

    def _step(self, n: int, position: int) -> None:
        """Run cell n; a fresh kernel gets what is needed of the cells before `position` first."""
        node, cell = self.code[n], self._cells[n]
        node.outputs = []
        self._pending.discard(cell.id)
        if not cell.source.strip() or (cell.points is not None and cell.question in self._lost):
            return
        if self._left() <= 0 or not self._ready(position, cell):
            node.outputs = [failure("OutOfTime", f"the notebook's {self.clock.notebook:.0f} s were used up before")]
            if not any(i.kind == "out_of_time" for i in self.report.incidents):
                self._note("out_of_time", cell.id, f"the notebook took more than {self.clock.notebook:.0f} s")
            return
        begun = time.monotonic()
        try:
            self._run_cell(node, cell)
            self.report.slowest_cell_s = max(self.report.slowest_cell_s, time.monotonic() - begun)
            if cell.points is not None or cell.id in self._written:
                self._ask_canary(cell)
            if cell.points is not None and self._session:
                hooks_back(self._session)
        except KernelLost as lost:
            node.outputs.append(failure("KernelLost", str(lost)))
            self._note("crashed" if "died" in str(lost) else "hung", cell.id, str(lost))
            self._banned.add(cell.id)
            if cell.points is not None:
                self._lost[cell.question] = failure("KernelLost", str(lost))
            self._stop()
        if cell.points is not None:
            make_plain(node, cell.points)

    def _run_cell(self, node: NotebookNode, cell: Cell) -> None:
        assert self._session
        seconds = self._seconds(node)
        if cell.points is not None:
            hooks_aside(self._session)
            mark = find_mark(node.source)
            if mark:
                self._run_hidden(node, cell, mark, seconds)
            else:
                run_check(self._session, node, seconds)
            self._note_hang(node, cell, seconds)
            return
        source = plain_python(cell.source)
        try:
            compile(source, f"<cell {cell.id}>", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        except (SyntaxError, ValueError, RecursionError) as error:
            node.outputs = [failure(type(error).__name__, str(error))]  # so that what was judged is what runs
            return
        work = copy.deepcopy(node)
        work.source = source
        try:
            self._session.run(work, seconds)
        finally:
            node.outputs = work.outputs
        self._note_hang(node, cell, seconds)

    def _note_hang(self, node: NotebookNode, cell: Cell, seconds: float) -> None:
        if any(o.output_type == "error" and o.ename == TIMEOUT for o in node.outputs):
            self._note("hung", cell.id, f"no end after {seconds:.0f} s")
            self._hung.add(cell.id)

    def _run_hidden(self, node: NotebookNode, cell: Cell, mark: tuple[str, str], seconds: float) -> None:
        """Run a black-box check; all its calls share the cell's time, and after a crash the others fail at once."""
        assert self._session and cell.points is not None
        restore_names(self._session, cell.id)
        session, until = self._session, time.monotonic() + seconds
        lost: list[str] = []

        def execute(source: str) -> tuple[str, str]:
            left = until - time.monotonic()
            if lost or left <= 0:
                return "", lost[0] if lost else f"no end after {seconds:.0f} s"
            try:
                return session.execute(source, left)
            except KernelLost as error:
                lost.append(str(error))
                return "", str(error)

        verdict = run_hidden(*mark, Remote(execute))
        points = round(cell.points * min(max(verdict.fraction, 0.0), 1.0), 4)
        node.outputs = [new_output("stream", name="stdout", text=verdict.message + "\n")] if verdict.message else []
        node.outputs.append(new_output("execute_result", data={"text/plain": repr(points)}, execution_count=1))
        if lost:
            self._note("crashed" if "died" in lost[0] else "hung", cell.id, lost[0])
            self._stop()

    def _ask_canary(self, cell: Cell) -> None:
        if not self._canary:
            return
        trouble = self._canary.trouble()
        if trouble:
            self._note("tampered", cell.id, trouble)
            culprit = cell.question if cell.points is not None or cell.is_solution else ""
            self._banned |= {cell.id, culprit} - {""}
            if culprit:
                self._lost[culprit] = failure("Tampered", trouble)
            self._stop()

    def _ready(self, n: int, cell: Cell) -> bool:
        """A kernel that has run what `cell` and the graded cells still to come need; False when time is up before."""
        while self._session is None and self._left() > 0:
            at_fault = None
            try:
                self._open()
                for past in self._replay(n, cell):
                    assert self._session and self._canary
                    if past.points is not None:
                        keep_names(self._session, past.id)
                        continue
                    at_fault = past
                    work = copy.deepcopy(self.code[self._cells.index(past)])
                    work.source = plain_python(past.source)
                    seconds = self._seconds(work)
                    self._session.run(work, min(seconds, AGAIN) if past.id in self._hung else seconds)
                    at_fault = past if past.id in self._written and self._canary.trouble() else None
                    if at_fault:
                        raise KernelLost("tampered")
            except KernelLost:
                self._stop()
                if at_fault is None:
                    raise RuntimeError(
                        "a fresh kernel cannot be started: is the Python environment complete?"
                    ) from None
                self._banned.add(at_fault.id)  # one fewer each time, so this ends
        return self._session is not None

    def _open(self) -> None:
        self._session = self._start(self._with_checks)
        self.report.kernels += 1
        self.report.tier = self.report.tier or tier(self._session)
        if self._with_checks:
            self._canary = Canary(self._session, self.lab)
            self._modules = self._canary.modules
        else:
            there = [m for m in self._modules if not f"{m}.".startswith(f"labkit.checks.{self.lab}.")]
            self._canary = Canary(self._session, "", there)

    def _replay(self, n: int, cell: Cell) -> list[Cell]:
        """Of the cells before n: locked ones, answers, what those to come need by name, and hidden cells to come."""
        ids = {c.id for c in self._cells}
        ahead = [c for c in self._cells if (c.id in self._pending or c is cell) and c.question not in self._lost]
        targets = {i for c in ahead for i in (c.id, c.question, f"{c.question}_check")} & ids
        by_name = {c.id for c in self._needed(targets)}
        hidden = set() if self._with_checks else {self._cells[h].id for h in self._hidden} & {c.id for c in ahead}
        return [
            c for c in self._cells[:n]
            if c.id in hidden
            or (c.points is None and c.id not in self._banned and c.source.strip()
                and (c.is_locked or c.is_solution or c.id in by_name))
        ]  # fmt: skip

    def _needed(self, targets: set[str]) -> list[Cell]:
        """What these cells need by name, and the student's cells that fill what is needed: `table.append(x)`."""
        used = needed(self._cells, targets) if targets else []
        filling = touching([c for c in self._cells if c.id in self._written], used)
        return needed(self._cells, targets | {c.id for c in filling}) if filling else used

    def _suspect(self) -> None:
        """The visible check passed and most hidden ones did not: nobody need have cheated, but somebody should look."""
        share = {c.id: earned(self.code[n]) / c.points for n, c in enumerate(self._cells) if c.points}
        for cell in self._cells:
            full = share.get(cell.id, 0) == 1 and cell.id == f"{cell.question}_check"
            hidden = share.get(f"{cell.question}_hidden", 1)
            if full and hidden < 0.5:
                part = f"{hidden:.0%}" if hidden else "nothing"
                self._note("suspicious", cell.question, f"all of the visible check passes and {part} of the hidden one")

    def _seconds(self, node: NotebookNode) -> float:
        return max(1.0, min(float(node.metadata.get("timeout", self.clock.cell)), self.clock.longest, self._left()))

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _note(self, kind: str, where: str, message: str) -> None:
        self.report.incidents.append(Incident(kind, where, message))

    def _stop(self) -> None:
        if self._session is not None:
            self._session.stop()
        self._session = self._canary = None


def _analysed(number: int, cell: NotebookNode) -> Cell:
    meta = cell.metadata.get("nbgrader", {})
    points = float(meta["points"]) if meta.get("grade") and not meta.get("solution") else None
    solution, locked = bool(meta.get("solution")), bool(meta.get("locked"))
    return Cell(meta.get("grade_id", f"cell{number}"), cell.source, points, solution, locked)


def _reads(source: str) -> bool:
    try:
        ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return False
    return True
