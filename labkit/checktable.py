"""What `labkit check` prints: a line while a question runs, one table, and below it what the checks said."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.table import Table

from labkit.labcheck import Report, check_notebook
from labkit.workspace import CampError

STYLES = {"passed": "green", "partial": "yellow", "failed": "red", "not solved": "dim", "missing": "red"}


def run(notebook: Path, release: Path | None, questions: list[str] | None, timeout: float, quiet: bool) -> Report:
    """Check a notebook, saying which question runs where somebody watches. CampError if it cannot be checked."""
    console = Console(stderr=True)
    try:
        with console.status("checking") as status:
            if quiet or not console.is_terminal:
                status.stop()
            return check_notebook(notebook, release, questions, timeout, lambda q: status.update(f"checking {q}"))
    except (ValueError, KeyError) as error:
        raise CampError(str(error.args[0])) from error


def show(report: Report) -> None:
    """Print the table, and what the checks said of wrong answers; of others only where one question was asked for."""
    console = Console(highlight=False)
    console.print(f"{report.notebook}  (proved on: {report.tier})", markup=False, soft_wrap=True)
    table = Table("question", "result", "points", "at grading")
    for v in report.verdicts:
        style = STYLES[v.status]
        table.add_row(
            v.question, f"[{style}]{v.status}[/]", f"{_points(v.earned)} of {v.possible:g}", f"+ {v.hidden:g}"
        )
    table.add_section()
    earned, possible, hidden = (sum(getattr(v, f) for v in report.verdicts) for f in ("earned", "possible", "hidden"))
    table.add_row("total", "", f"{_points(earned)} of {possible:g}", f"+ {hidden:g}")
    console.print(table)
    missing = [v.question for v in report.verdicts if v.status == "missing"]
    if missing:
        console.print(f"\nno cell in the notebook, copy it from a newer release: {', '.join(missing)}", soft_wrap=True)
    for v in report.verdicts:
        if v.status in ("partial", "failed") or len(report.verdicts) == 1:
            console.print(f"\n{v.question}: {v.status}", style="bold", markup=False)
            console.print(v.said, markup=False, soft_wrap=True)


def _points(earned: float) -> str:
    return f"{round(earned, 2):g}"


def as_json(report: Report) -> str:
    """The report as JSON: notebook, tier, all_well, and one object a question."""
    questions = [asdict(v) for v in report.verdicts]
    head = {"notebook": str(report.notebook), "tier": report.tier, "all_well": report.all_well}
    return json.dumps(head | {"questions": questions}, indent=1)
