"""The end of a grading run: a table for the eye, and a CSV that names every failed, tampered and missing submission."""

from __future__ import annotations

import csv
from collections import Counter
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

STYLE = {"graded": "green", "tampered": "yellow", "failed": "red", "missing": "magenta"}


@dataclass(frozen=True)
class Line:
    """One submission's outcome. status: graded, tampered (graded, and look at it), failed (no grade given), missing."""

    lab: str
    student: str
    status: str
    score: float | None = None
    max_score: float | None = None
    late_penalty: float = 0.0
    needs_manual: bool = False
    seconds: float = 0.0
    kernels: int = 0
    tier: str = ""
    sandbox: str = ""
    notes: str = ""


def write_csv(lines: list[Line], target: Path) -> None:
    """One row per submission, sorted by lab and student."""
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Line)])
        writer.writeheader()
        for line in sorted(lines, key=lambda each: (each.lab, each.student)):
            writer.writerow({k: _field(v) if isinstance(v, str) else v for k, v in asdict(line).items()})


def _field(text: str) -> str:
    """A spreadsheet runs a cell that starts like a formula, and students choose some of these words."""
    return printable(f"'{text}" if text.startswith(("=", "+", "-", "@", "\t", "\r")) else text)


def printable(text: str) -> str:
    """With escapes for what no file or terminal should get: half characters, control codes, text that runs backwards.

    A file's name need not be UTF-8, and a student chooses it.
    """
    return "".join(c if c.isprintable() or c == "\n" else ascii(c)[1:-1] for c in text)


def print_table(lines: list[Line], console: Console) -> None:
    """The same rows, and a count of each status."""
    table = Table(title="Grades")
    for name, justify in (("lab", "left"), ("student", "left"), ("status", "left"), ("score", "right"), ("s", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    table.add_column("notes", overflow="fold")
    for line in sorted(lines, key=lambda each: (each.lab, each.student)):
        score = "" if line.score is None else f"{line.score:g} / {line.max_score:g}"
        late = f"late: -{line.late_penalty:g}. " if line.late_penalty else ""
        style = STYLE[line.status]
        table.add_row(
            _short(line.lab),
            _short(line.student),
            f"[{style}]{line.status}[/]",
            score,
            f"{line.seconds:.1f}",
            _short(late + line.notes),
        )
    console.print(table)
    count = Counter(line.status for line in lines)
    console.print(", ".join(f"{count[status]} {status}" for status in STYLE if count[status]) or "nothing to grade")


def _short(text: str) -> str:
    return escape(printable(text if len(text) <= 300 else text[:297] + "..."))
