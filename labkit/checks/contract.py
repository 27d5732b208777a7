"""Questions, invariants, results. Everything a lab's checks are written with, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from labkit.checks import forbidden


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
        said = {row.message for row in self.rows}
        if len(said) == 1 and len(self.rows) > 1 and not any(row.passed for row in self.rows):
            return "\n".join([*lines, f"  FAIL  {said.pop()}"])  # not solved, or refused: once is enough
        for row in self.rows:
            ratio = "" if row.ratio is None else f"  [error {row.ratio:.2f} of what is allowed]"
            lines.append(f"  {'ok  ' if row.passed else 'FAIL'}  {row.name}{ratio}")
            if row.message:
                lines.append(f"        {row.message}")
        return "\n".join(lines)
