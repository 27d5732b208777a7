"""Claims on trial: a sentence from the article, the experiment, and a verdict that follows from what was measured."""

from __future__ import annotations

import html
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """claim: the sentence. experiment: what was done. expected: what the claim predicts. measured: what came out.

    holds: whether the measurement bears the claim out, computed by the caller; None if it tells nothing.
    """

    claim: str
    experiment: str
    expected: str
    measured: str
    holds: bool | None

    @classmethod
    def asked(
        cls, claim: str, experiment: str, expected: str, ask: Callable[[], tuple[str, bool | None]]
    ) -> Trial:  # fmt: skip
        """A trial of what `ask()` gives: (measured, holds). What it raises leaves this one claim open, and is said."""
        try:
            measured, holds = ask()
        except Exception as error:
            measured, holds = _said(error), None
        return cls(claim, experiment, expected, measured, holds)

    @property
    def verdict(self) -> str:
        """ "holds", "refuted" or "open"."""
        return {True: "holds", False: "refuted", None: "open"}[self.holds]


class Verdicts(list[Trial]):
    """A list of trials that a notebook shows as a table."""

    def __repr__(self) -> str:
        lines = []
        for trial in self:
            lines.append(f"[{trial.verdict:>7}] {trial.claim}")
            lines.append(
                f"          {trial.experiment}; the claim predicts {trial.expected}, measured {trial.measured}"
            )
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        head = "<tr><th>claim</th><th>experiment</th><th>predicted</th><th>measured</th><th>verdict</th></tr>"
        cells = ("<td style='text-align:left'>{}</td>" * 5).format
        rows = [
            f"<tr>{cells(*map(html.escape, (t.claim, t.experiment, t.expected, t.measured, t.verdict)))}</tr>"
            for t in self
        ]
        return f"<table>{head}{''.join(rows)}</table>"


def nothing_to_show(error: Exception, needs: str) -> str:
    """What a cell prints in place of a result. needs: the questions that it uses ("question 1", "questions 2 and 3").

    "Solve question 1 first" only if that is what is missing; else what went wrong, since a student who has solved it
    would look for the fault in the wrong place.
    """
    if isinstance(error, NotImplementedError):
        return f"solve {needs} first"
    return f"nothing to show: {_said(error)}. This uses {needs}, and what the cells above have measured"


def _said(error: Exception) -> str:
    if isinstance(error, NotImplementedError):
        return "a question that this needs is not solved yet"
    if isinstance(error, NameError):
        return f"a cell above gave no result ({error})"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}".removesuffix(": ")
