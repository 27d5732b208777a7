"""`python -m grading`: what `labkit build`, `labkit grade` and `labkit release` run, and `make demo`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Instructors: build, release and grade the labs.")
TROUBLE = (ValueError, KeyError, OSError)  # what our own code says in one line


def _complain(error: Exception) -> typer.Exit:
    text = str(error.args[0]) if isinstance(error, KeyError) and error.args else str(error)
    Console(stderr=True).print(f"error: {text}", style="red", markup=False, highlight=False)
    return typer.Exit(2)


@app.command()
def build(
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", help="All labs if none is named.")] = None,
    only_check: Annotated[bool, typer.Option("--check", help="Write nothing; fail if a notebook is stale.")] = False,
) -> None:
    """Write both notebooks of each lab from its one source. Refuses to change a lab's questions under submissions."""
    from grading import build as builder

    stale: list[Path] = []
    try:
        unknown = set(labs or []) - set(builder.labs())
        if unknown:
            raise ValueError(f"no lab {', '.join(sorted(unknown))}; there are: {', '.join(builder.labs())}")
        for lab in labs or builder.labs():
            stale += builder.build(lab, check_only=only_check)
    except TROUBLE as error:
        raise _complain(error) from None
    for path in stale:
        typer.echo(f"{'out of date' if only_check else 'wrote'}: {path.relative_to(builder.ROOT)}")
    raise typer.Exit(1 if only_check and stale else 0)


@app.command()
def release(
    target: Annotated[Path, typer.Argument(metavar="DIR", help="A folder that is empty or not there.")],
) -> None:
    """Write the student's bundle, with no solution and no hidden check in it."""
    from grading.release import write_bundle

    try:
        files = write_bundle(target)
    except TROUBLE as error:
        raise _complain(error) from None
    typer.echo(f"{len(files)} files in {target}")


@app.command()
def grade(
    submissions: Annotated[Path, typer.Option(metavar="DIR", help="DIR/<student>/<lab>/<lab>.ipynb, or zip files.")],
    labs: Annotated[list[str] | None, typer.Argument(metavar="[LAB]...", help="All labs if none is named.")] = None,
    workers: Annotated[int | None, typer.Option(min=1, help="At a time. Default: one per GPU, else per core.")] = None,
    roster: Annotated[Path | None, typer.Option(help="File of student names, one a line: who is missing?")] = None,
    feedback: Annotated[Path | None, typer.Option(metavar="DIR", help="Write a feedback page per student.")] = None,
    csv: Annotated[Path | None, typer.Option(metavar="FILE", help="Default: grading/reports/grades.csv")] = None,
    sandbox: Annotated[str, typer.Option(help="auto, require, or off (students' code then runs as you).")] = "auto",
    notebook_seconds: Annotated[float, typer.Option(min=1, help="Wall clock of one notebook.")] = 1200,
    cell_seconds: Annotated[float, typer.Option(min=1, help="The most for any one cell.")] = 600,
    memory_gb: Annotated[float, typer.Option(min=1, help="Address space of a kernel (not with a GPU).")] = 8,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON instead of a table.")] = False,
) -> None:
    """Grade a folder of submissions: gradebook, table, CSV. Exit code 1 if any could not be graded.

    \b
    Examples:
      labkit grade --submissions handed_in --roster class.txt
      labkit grade lab1_paged_attention --submissions handed_in --workers 4 --feedback pages
    """
    from dataclasses import asdict

    from grading.grade import Options, grade_folder
    from grading.pool import default_workers

    times = {"notebook_seconds": notebook_seconds, "longest_cell_seconds": cell_seconds, "memory_gb": memory_gb}
    try:
        names = roster.read_text(encoding="utf-8").split() if roster else []
        options = Options(workers or default_workers(), sandbox, names, feedback, csv, times, quiet=as_json)
        lines = grade_folder(submissions, labs or [], options=options)
    except TROUBLE as error:
        raise _complain(error) from None
    if as_json:
        typer.echo(json.dumps([asdict(line) for line in lines], indent=1))
    raise typer.Exit(1 if any(line.status == "failed" for line in lines) else 0)


@app.command()
def demo() -> None:
    """Play a whole class through, headless: build, release, three students a lab, grades, feedback."""
    from grading.demo import play

    try:
        fine = play()
    except TROUBLE as error:
        raise _complain(error) from None
    raise typer.Exit(0 if fine else 1)


if __name__ == "__main__":
    app(prog_name="grading")
