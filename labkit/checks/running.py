"""Running a question's checks on an answer: no error escapes, nothing reaches stderr, a dangerous kernel runs apart."""

from __future__ import annotations

import math
import os
import traceback
import warnings
from typing import Any

from labkit import device
from labkit.checks import capture, forbidden, isolate
from labkit.checks.contract import Failed, Invariant, Question, Result, Row
from labkit.checks.neutral import neutral
from labkit.checks.registry import find_question


def check(question: str, answer: Any) -> Result:
    """Run the public checks of `question` on `answer`, a function or class of the notebook.

    Raises KeyError for an unknown question. Never raises for a wrong answer, and nothing reaches stderr: nbgrader
    gives no point to a cell that writes there.
    """
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
    with capture.stderr() as said, warnings.catch_warnings(), neutral():
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
        bare = isinstance(error, NotImplementedError) and "".join(map(str, error.args)).strip()
        if bare == "" or (bare and bare.startswith("(at ")):  # the meter adds where
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
