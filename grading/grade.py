"""`labkit grade`: a folder of submissions in; a gradebook, a table and a CSV out. No submission stops the others."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field, replace
from pathlib import Path

from rich.console import Console
from tqdm import tqdm

from grading import gradebook
from grading.course import Course
from grading.nbgrader_config import course_config
from grading.pool import default_workers, process_context, run_all
from grading.report import Line, print_table, write_csv
from grading.sandbox import camp_copy, unavailable
from grading.submissions import Submission, composed, find_submissions
from grading.worker import Graded, Job

TAMPERED = ("tampered", "refused", "suspicious")


@dataclass
class Options:
    """How to grade. settings: traits of SafeExecute (times, memory). sandbox: "auto", "require" or "off"."""

    workers: int = field(default_factory=default_workers)
    sandbox: str = "auto"
    roster: list[str] = field(default_factory=list)
    feedback: Path | None = None
    csv: Path | None = None
    settings: dict = field(default_factory=dict)
    quiet: bool = False


def grade_folder(
    submissions: Path, labs: Iterable[str] = (), course: Course | None = None, options: Options | None = None
) -> list[Line]:
    """Grade every submission in a folder, merge into the course's gradebook, write the CSV; gives its rows.

    labs: slugs, all by default. Grading again gives the same grades, renews automatic scores after a check was fixed,
    and keeps manual ones. ValueError for an unknown lab, a folder that is none, or a sandbox that is required and
    absent; FrozenError when a lab's questions changed under its submissions.
    """
    course, options = (course or Course()).activate(), options or Options()
    chosen = _known(course, labs)
    console = Console(quiet=options.quiet)
    isolated = _isolated(options.sandbox, console)
    found = find_submissions(submissions, course, chosen)
    lines = [_line(s, "failed", notes=s.problem) for s in found if s.problem]
    good = {(s.student, s.lab): s for s in found if not s.problem}
    with tempfile.TemporaryDirectory(prefix="camp-grade-") as folder:
        jobs = _jobs(course, list(good.values()), Path(folder), options.settings | {"sandbox": isolated})
        seconds = 60 + 1.1 * float(options.settings.get("notebook_seconds", 1200))
        progress = tqdm(total=len(jobs), desc="grading", unit="submission", disable=options.quiet or not jobs)
        with gradebook.opened(course) as book, progress:
            for job, result in run_all(jobs, options.workers, seconds):
                lines.append(_safely_merged(course, book, good[job.student, job.lab], job, result))
                progress.update()
    names = {(line.student, line.lab) for line in lines}
    lines += [
        Line(lab, s, "missing", notes="nothing was handed in")
        for lab in chosen
        for s in map(composed, options.roster)
        if (s, lab) not in names
    ]
    table = options.csv or course.root / "grading" / "reports" / "grades.csv"
    write_csv(lines, table)  # before the feedback, which takes minutes: nothing that goes wrong there costs the grades
    if options.feedback:
        lines = _write_feedback(course, lines, options.feedback, options.workers)
        write_csv(lines, table)
    print_table(lines, console)
    return lines


def _known(course: Course, labs: Iterable[str]) -> list[str]:
    chosen, there = list(labs), course.labs()
    unknown = [lab for lab in chosen if lab not in there]
    if unknown:
        raise ValueError(f"no lab {', '.join(unknown)}; there are: {', '.join(there)}")
    return chosen or there


def _isolated(mode: str, console: Console) -> bool:
    if mode not in ("auto", "require", "off"):
        raise ValueError(f'sandbox is {mode!r}, expected "auto", "require" or "off"')
    reason = "it was switched off" if mode == "off" else unavailable()
    if not reason:
        return True
    if mode == "require":
        raise ValueError(f"the sandbox is required, and {reason}")
    console.print(
        f"[bold red]NO SANDBOX: {reason}.[/] Students' code runs as you: it can read solutions, the gradebook and "
        "other submissions, change them, and use the network. Every row of the report says so."
    )
    return False


def _jobs(course: Course, submissions: list[Submission], folder: Path, settings: dict) -> list[Job]:
    jobs = []
    for lab in sorted({s.lab for s in submissions}):
        gradebook.register(course, lab)
        template = folder / f"{lab}.db"  # a copy for each worker: what it writes into its own is read back and merged
        shutil.copy(course.gradebook, template)
        camp = camp_copy(course, lab, folder / "camp" / lab)
        for n, s in enumerate(s for s in submissions if s.lab == lab):
            place = folder / lab / str(n)
            jobs.append(Job(s.student, lab, s.notebook, course.root, place, template, settings | {"camp": str(camp)}))
    return jobs


def _safely_merged(course: Course, book: gradebook.Gradebook, submission: Submission, job: Job, result: Graded) -> Line:
    try:
        return _merged(course, book, submission, job, result)
    except Exception as error:  # whatever it is, it is one submission's: the others are graded
        book.db.rollback()
        reason = f"it was run, and cannot be recorded: {type(error).__name__}: {error}"[:500]
        return _line(submission, "failed", seconds=result.seconds, notes=reason)


def _merged(course: Course, book: gradebook.Gradebook, submission: Submission, job: Job, result: Graded) -> Line:
    if result.error:
        return _line(submission, "failed", seconds=result.seconds, notes=result.error)
    config = course_config(course.root)
    standing = gradebook.merge(
        book, submission.lab, submission.student, result.scores, result.comments, submission.submitted, config
    )
    _keep_autograded(course, job)
    incidents = result.report["incidents"]
    notes = [f"{i['kind']} in {i['where']}: {i['message']}" for i in incidents]
    notes += [f"repaired {note}" for note in result.report["repairs"]]
    odd = any(i["kind"] in TAMPERED for i in incidents) or any(f.startswith("tampered") for f in submission.flags)
    return _line(
        submission, "tampered" if odd else "graded", score=round(standing.score, 4), max_score=standing.max_score,
        late_penalty=standing.penalty, needs_manual=standing.needs_manual, seconds=result.seconds,
        kernels=result.report["kernels"], tier=result.report["tier"], sandbox=result.report["sandbox"],
        notes="; ".join(notes),
    )  # fmt: skip


def _line(submission: Submission, status: str, **values) -> Line:
    notes = "; ".join([*submission.flags, *filter(None, [values.pop("notes", "")])])
    return Line(submission.lab, submission.student, status, notes=notes, **values)


def _keep_autograded(course: Course, job: Job) -> None:
    """Where nbgrader and its formgrader look for the autograded notebook."""
    target = course.root / "grading" / "autograded" / job.student / job.lab
    if target.exists():
        shutil.rmtree(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(job.folder / "course" / "autograded" / job.student / job.lab, target)


def _write_feedback(course: Course, lines: list[Line], target: Path, workers: int) -> list[Line]:
    """Write the pages of all who have a grade. Gives the lines, with a note where a page could not be written."""
    graded = [line for line in lines if line.score is not None]
    failed = _pages(course, graded, target, workers)
    # One process that dies takes its whole pool along: what was lost so is tried once more, each in a pool of its own.
    for line, error in list(failed.items()):
        if isinstance(error, BrokenProcessPool):
            del failed[line]
            failed |= _pages(course, [line], target, 1)
    return [_with_note(line, failed[line]) if line in failed else line for line in lines]


def _with_note(line: Line, error: Exception) -> Line:
    reason = f"no feedback page: {type(error).__name__}: {error}"[:300]
    return replace(line, notes="; ".join(filter(None, [line.notes, reason])))


def _pages(course: Course, lines: list[Line], target: Path, workers: int) -> dict[Line, Exception]:
    failed: dict[Line, Exception] = {}
    with ProcessPoolExecutor(workers, mp_context=process_context()) as pool:
        begun = [(line, pool.submit(gradebook.feedback, course, line.lab, line.student, target)) for line in lines]
        for line, done in begun:
            try:
                done.result()
            except Exception as error:
                failed[line] = error
    return failed
