"""Claims on trial: a sentence from the article, the experiment, and a verdict that follows from what was measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Trial:
    """claim: the sentence. experiment: what was done. expected: what the claim predicts. measured: what came out.

    holds: whether the measurement bears the claim out, computed by the caller from the numbers.
    """

    claim: str
    experiment: str
    expected: str
    measured: str
    holds: bool

    @property
    def verdict(self) -> str:
        """ "holds" or "refuted"."""
        return "holds" if self.holds else "refuted"


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
        rows = [f"<tr>{cells(t.claim, t.experiment, t.expected, t.measured, t.verdict)}</tr>" for t in self]
        return f"<table>{head}{''.join(rows)}</table>"
