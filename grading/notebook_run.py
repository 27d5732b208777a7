"""Runs one submitted notebook: a crash, a hang or a cheat costs the question it happened in, and no other.

The cells run in order in one sandboxed kernel. When it dies, hangs or stops telling the truth, the cell at fault is
left out, a new kernel gets the cells that the remaining questions need by name, and the run goes on, until the
notebook's wall clock is up.
"""

from __future__ import annotations

import ast
import copy
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field

from nbformat import NotebookNode
from nbformat.v4 import new_output

from grading.blackbox import Remote, find_mark, run_hidden
from grading.canary import Canary, tier
from grading.session import TIMEOUT, KernelLost, Session, failure
from labkit.cells import Cell, needed, plain_python
from labkit.labcheck import refusal


@dataclass(frozen=True)
class Incident:
    """Something that the instructor should know of. kind: crashed, hung, tampered, refused, unreadable,
    out_of_time, suspicious."""

    kind: str
    where: str
    message: str


@dataclass
class Report:
    """What happened besides the grades."""

    incidents: list[Incident] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    tier: str = ""
    sandbox: str = ""
    slowest_cell_s: float = 0.0
    kernels: int = 0

    def to_dict(self) -> dict:
        return asdict(self)


@dataclass(frozen=True)
class Clock:
    """Seconds for one cell without a limit of its own, the most for any cell, and for the whole notebook."""

    cell: float = 60.0
    longest: float = 600.0
    notebook: float = 1200.0


class NotebookRun:
    """One run over a notebook whose cells RepairCells has put in order. Outputs land in the cells."""

    def __init__(
        self, cells: list[NotebookNode], lab: str, start: Callable[[], Session], clock: Clock, release: set[str]
    ):
        """release: sources of the release's cells, which no student wrote. start: makes a fresh kernel."""
        self.code = [c for c in cells if c.cell_type == "code"]
        self.lab, self.clock = lab, clock
        self.report = Report()
        self._start = start
        self._session: Session | None = None
        self._canary: Canary | None = None
        self._deadline = time.monotonic() + clock.notebook
        self._cells = [_analysed(n, cell) for n, cell in enumerate(self.code)]
        self._written = {c.id for c in self._cells if c.is_solution or not (c.is_locked or c.source in release)}
        self._banned: set[str] = set()
        self._lost: dict[str, NotebookNode] = {}  # question -> why it gets no points

    def run(self) -> Report:
        """Run everything. Never raises for what a student did."""
        self._refuse()
        try:
            for n, cell in enumerate(self._cells):
                self._step(n, cell)
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

    def _step(self, n: int, cell: Cell) -> None:
        node = self.code[n]
        node.outputs = []
        if not cell.source.strip() or (cell.points is not None and cell.question in self._lost):
            return
        if self._left() <= 0 or not self._ready(n):
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
        except KernelLost as lost:
            node.outputs.append(failure("KernelLost", str(lost)))
            self._note("crashed" if "died" in str(lost) else "hung", cell.id, str(lost))
            self._banned.add(cell.id)
            self._stop()
        if cell.points is not None:
            _make_plain(node, cell.points)

    def _run_cell(self, node: NotebookNode, cell: Cell) -> None:
        assert self._session
        seconds = self._seconds(node)
        mark = find_mark(node.source)
        if mark and cell.points is not None:
            self._hidden(node, cell, mark, seconds)
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
        if any(o.output_type == "error" and o.ename == TIMEOUT for o in node.outputs):
            self._note("hung", cell.id, f"no end after {seconds:.0f} s")

    def _hidden(self, node: NotebookNode, cell: Cell, mark: tuple[str, str], seconds: float) -> None:
        """Run a black-box check; all its calls share the cell's time, and after a crash the others fail at once."""
        assert self._session and cell.points is not None
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

    def _ready(self, n: int) -> bool:
        """A kernel that has run what the graded cells from here on need; False when time is up before that."""
        while self._session is None and self._left() > 0:
            at_fault = None
            try:
                self._open()
                for cell in self._replay(n):
                    at_fault = cell
                    work = copy.deepcopy(self.code[self._cells.index(cell)])
                    work.source = plain_python(cell.source)
                    assert self._session
                    self._session.run(work, self._seconds(work))
                    at_fault = cell if self._canary and cell.id in self._written and self._canary.trouble() else None
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
        self._session = self._start()
        self.report.kernels += 1
        self.report.tier = self.report.tier or tier(self._session)
        self._canary = Canary(self._session, self.lab)

    def _replay(self, n: int) -> list[Cell]:
        before = self._cells[:n]
        targets = [c.id for c in self._cells[n:] if c.points is not None]
        by_name = {c.id for c in needed(self._cells, targets)} if targets else set()
        return [
            c for c in before
            if c.points is None and c.id not in self._banned and (c.id in by_name or c.is_locked) and c.source.strip()
        ]  # fmt: skip

    def _suspect(self) -> None:
        """The visible check passed and no hidden one did: nobody need have cheated, but somebody should look."""
        scores = {c.id: _score(self.code[n]) for n, c in enumerate(self._cells) if c.points}
        for cell in self._cells:
            full = cell.points and scores.get(cell.id) == cell.points and cell.id == f"{cell.question}_check"
            if full and scores.get(f"{cell.question}_hidden") == 0:
                self._note("suspicious", cell.question, "all of the visible check passes and nothing of the hidden one")

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


def _score(cell: NotebookNode) -> float:
    """What a graded cell earned: the number of its first result, 0 after an error."""
    for output in cell.outputs:
        if output.output_type == "error":
            return 0.0
        if output.output_type == "execute_result":
            return float(output.data["text/plain"])
    return 0.0


def _make_plain(cell: NotebookNode, points: float) -> None:
    """nbgrader gives full marks for no result, None, NaN, a list or a negative number; here they are no score."""
    results = [o for o in cell.outputs if o.output_type == "execute_result"]
    if any(o.output_type == "error" for o in cell.outputs):
        cell.outputs = [o for o in cell.outputs if o.output_type != "execute_result"]
        return
    try:
        good = len(results) == 1 and 0 <= float(results[0].data["text/plain"]) <= points
    except (KeyError, ValueError):
        good = False
    if not good:
        shown = ", ".join(r.data.get("text/plain", "")[:100] for r in results[:3]) or "nothing"
        cell.outputs = [o for o in cell.outputs if o.output_type != "execute_result"]
        cell.outputs.append(
            failure("NoScore", f"the cell should end in a score of 0 to {points}, and ended in {shown}")
        )
