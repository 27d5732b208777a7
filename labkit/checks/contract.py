"""Questions, invariants, results. Everything a lab's checks are written with, and nothing else."""

from __future__ import annotations

import math
import os
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit import device
from labkit.checks import capture, forbidden, isolate


class Failed(AssertionError):
    """An invariant does not hold. The message is one sentence that says what to look at."""


def require(condition: bool, message: str) -> None:
    """Raise Failed with `message` unless `condition` holds."""
    if not condition:
        raise Failed(message)


@dataclass(frozen=True)
class Invariant:
    """One named property of an answer. `run(answer)` raises Failed, or returns an error ratio to show, or None.

    stops: where it fails, the ones after it are not run, and fail with it.
    """

    name: str
    run: Callable[[Any], float | None]
    share: float
    stops: bool = False


@dataclass
class Question:
    """A graded question.

    id: names its cells, hidden check and mutants. lab: slug of its lab. about: the sentence after "Check that".
    shipped: modules of ours that hold this very answer; they are refused in the answer and masked in the sandbox.
    refused: further dotted names that the answer may not use (SDPA where a kernel is asked for).
    allowed: dotted names of labkit or kernels that the answer may use; all others are refused.
    launches_kernels: on a GPU its checks run in a process of their own.
    """

    id: str
    lab: str
    about: str
    shipped: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    allowed: tuple[str, ...] = ()
    launches_kernels: bool = False
    invariants: list[Invariant] = field(default_factory=list)

    def invariant(self, name: str, share: float = 1.0, stops: bool = False) -> Callable:
        """Decorator that adds a check; `name` is a sentence that holds when the check passes.

        stops: what comes after it is only run if it holds, since it might crash or mean nothing otherwise.
        """

        def add(run: Callable[[Any], float | None]) -> Callable[[Any], float | None]:
            self.invariants.append(Invariant(name, run, share, stops))
            return run

        return add

    def violations(self, source: str) -> list[str]:
        """Forbidden names used by `source`, each as one sentence; empty if there are none."""
        return forbidden.violations(source, self.shipped + self.refused, self.allowed)


@dataclass(frozen=True)
class Row:
    """What became of one invariant. `ratio` is the error over the allowed error, where there is one."""

    name: str
    share: float
    passed: bool
    message: str = ""
    ratio: float | None = None


@dataclass(frozen=True)
class Result:
    """The rows of one question and the tier that proved them ("interpreter" or "cuda")."""

    question: str
    rows: tuple[Row, ...]
    tier: str

    @property
    def fraction(self) -> float:
        """Earned share, 0 to 1."""
        total = sum(row.share for row in self.rows)
        return sum(row.share for row in self.rows if row.passed) / total if total else 0.0

    def __str__(self) -> str:
        lines = [f"{self.question}  (proved on: {self.tier})"]
        for row in self.rows:
            ratio = "" if row.ratio is None else f"  [error {row.ratio:.2f} of what is allowed]"
            lines.append(f"  {'ok  ' if row.passed else 'FAIL'}  {row.name}{ratio}")
            if row.message:
                lines.append(f"        {row.message}")
        return "\n".join(lines)


def check(question: str, answer: Any) -> Result:
    """Run the public checks of `question` on `answer`, a function or class of the notebook.

    Raises KeyError for an unknown question. Never raises for a wrong answer, and nothing reaches stderr: nbgrader
    gives no point to a cell that writes there.
    """
    from labkit.checks.registry import find_question

    q = find_question(question)
    refused = forbidden.shipped_object(answer) or "; ".join(q.violations(forbidden.source_of(answer)))
    if refused:
        rows = _all_failed(q, refused)
    elif q.launches_kernels and device.tier() == "cuda" and not isolate.in_child():
        rows = _run_isolated(q, answer)
    else:
        rows = _run_all(q, answer)
    return Result(q.id, tuple(rows), device.tier())


def _all_failed(q: Question, message: str) -> list[Row]:
    return [Row(i.name, i.share, False, message) for i in q.invariants]


def _run_isolated(q: Question, answer: Any) -> list[Row]:
    """On a GPU, in a child process: a kernel that leaves its tensors would end CUDA in this one."""
    try:
        return [Row(**fields) for fields in isolate.rows(q.id, answer)]
    except (RuntimeError, ValueError) as error:
        return _all_failed(q, str(error))


def _run_all(q: Question, answer: Any) -> list[Row]:
    rows: list[Row] = []
    for invariant in q.invariants:
        row = _run(invariant, answer)
        rows.append(row)
        if len(rows) == 1 and row.message == NOT_SOLVED:  # the others would say the same
            return _all_failed(q, NOT_SOLVED)
        if invariant.stops and not row.passed:
            why = f"not run: first it must hold that {invariant.name}"
            return rows + [Row(i.name, i.share, False, why) for i in q.invariants[len(rows) :]]
    return rows


NOT_SOLVED = "not solved yet: the cell still raises NotImplementedError"
MAX_MESSAGE = 600  # characters: the repr of a large tensor hides what the sentence says


def _run(invariant: Invariant, answer: Any) -> Row:
    with capture.stderr() as said, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, about an inf or nan that the check itself names
        try:
            ratio = invariant.run(answer)
            return Row(invariant.name, invariant.share, True, ratio=None if ratio is None else float(ratio))
        except Failed as error:
            message = str(error)
        except (Exception, SystemExit) as error:
            message = NOT_SOLVED if _is_stub(error) else f"your code raised {_sentence(error)}{_where(error)}"
    if len(message) > MAX_MESSAGE:
        message = message[:MAX_MESSAGE] + " ..."
    tail = said().strip().splitlines()[-1:]
    if tail and message != NOT_SOLVED:
        message += f" (last line on stderr: {tail[0][:200]})"
    return Row(invariant.name, invariant.share, False, message)


def _is_stub(error: BaseException | None) -> bool:
    """Whether a bare `raise NotImplementedError` is the cause; Triton's interpreter wraps what a kernel raises."""
    while error is not None:
        if isinstance(error, NotImplementedError) and not error.args:
            return True
        error = error.__cause__ or error.__context__
    return False


def _sentence(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # an exception of the student's own whose __str__ fails
        return type(error).__name__


def _where(error: BaseException) -> str:
    """The innermost line of the notebook in the traceback: a line of torch or of labkit says nothing to a student.

    A cell has a file name of its own, under which no file exists.
    """
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.line and not os.path.exists(f.filename)]
    return f" (at `{frames[-1].line.strip()}`)" if frames and frames[-1].line else ""


def score(result: Result, points: float = 1.0) -> float:
    """Print the result's table and give `points` times the earned fraction: a plain float in [0, points], never NaN."""
    print(result)
    value = float(points) * float(result.fraction)
    return round(min(max(value, 0.0), float(points)), 4) if math.isfinite(value) else 0.0
