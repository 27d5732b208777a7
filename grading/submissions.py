"""Finds submissions in a folder, and looks each over before any of it is run.

Layouts: `DIR/<student>/<lab>/<lab>.ipynb` (nbgrader's own), and zip files anywhere in DIR that hold `<lab>.ipynb` and
the `manifest.json` of `labkit submit`. Trouble with one is a sentence about that one.
"""

from __future__ import annotations

import hashlib
import json
import re
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.utils import parse_utc

from grading.course import Course

STUDENT = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._@+-]{0,63}")
MAX_BYTES = 100_000_000  # of one file; a zip file can claim to hold far more than it weighs
IGNORED = {"timestamp.txt", "manifest.json"}


@dataclass
class Submission:
    """One student's work on one lab. problem: why it cannot be graded, or "". flags: what to know of it."""

    student: str
    lab: str
    source: Path
    notebook: str = ""
    submitted: datetime | None = None
    problem: str = ""
    flags: list[str] = field(default_factory=list)


class Unusable(Exception):
    """A submission that cannot be graded, and why."""


def find_submissions(folder: Path, course: Course, labs: list[str]) -> list[Submission]:
    """Every submission of these labs in `folder`, of several by one student the newest. ValueError for no folder."""
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of submissions")
    newest: dict[tuple[str, str], Submission] = {}
    for found in _everything(folder, course, labs):
        key = (found.student, found.lab)
        rivals = sorted(filter(None, (newest.get(key), found)), key=lambda s: s.submitted or datetime.min)
        newest[key] = rivals[-1]
        if len(rivals) == 2:
            rivals[1].flags.append(f"also handed in: {rivals[0].source.name}")
    return [newest[key] for key in sorted(newest)]


def _everything(folder: Path, course: Course, labs: list[str]) -> Iterator[Submission]:
    for place in sorted(p for lab in labs for p in folder.glob(f"*/{lab}") if p.is_dir()):
        yield _guarded(Submission(place.parent.name, place.name, place), course, _read_folder)
    for archive in sorted(folder.rglob("*.zip")):
        student, lab = _names_of(archive, folder, labs)
        if lab in labs:
            yield _guarded(Submission(student, lab, archive), course, _read_zip)
        elif not lab:
            yield Submission(
                student, labs[0] if len(labs) == 1 else "?", archive, problem="no lab's notebook is in this zip file"
            )


def _guarded(submission: Submission, course: Course, read) -> Submission:
    try:
        if not STUDENT.fullmatch(submission.student):
            raise Unusable(f"{submission.student!r} is not a student's name: letters, digits and ._@+- only")
        text = read(submission, course)
        submission.notebook = nbformat.writes(clean_notebook(text))
    except Unusable as error:
        submission.problem = str(error)
    except (OSError, zipfile.BadZipFile, RuntimeError, NotImplementedError) as error:  # the last two: encrypted, odd
        submission.problem = f"{submission.source.name} cannot be read: {error}"
    return submission


def _read_folder(submission: Submission, course: Course) -> str:
    folder, lab = submission.source, submission.lab
    files = sorted(p for p in folder.rglob("*") if p.is_file() or p.is_symlink())
    submission.submitted = _timestamp(folder / "timestamp.txt")
    names = [str(p.relative_to(folder)) for p in files]
    _flag_extra(submission, names, course)
    chosen = _choose(names, lab, submission, lambda name: _text(folder / name))
    return _text(folder / chosen)


def _text(path: Path) -> str:
    if path.is_symlink():
        raise Unusable(f"{path.name} is a link, not a notebook")
    if path.stat().st_size > MAX_BYTES:
        raise Unusable(f"{path.name} has {path.stat().st_size / 1e6:.0f} MB; {MAX_BYTES / 1e6:.0f} is the limit")
    return _decoded(path.read_bytes(), path.name)


def _decoded(data: bytes, name: str) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise Unusable(f"{name} is not a text file") from None


def _read_zip(submission: Submission, course: Course) -> str:
    with zipfile.ZipFile(submission.source) as archive:
        names = [i.filename for i in archive.infolist() if not i.is_dir()]
        manifest = _manifest(archive)
        if isinstance(manifest.get("student"), str) and manifest["student"] != submission.student:
            submission.flags.append(f"the manifest says that it is by {manifest['student'][:64]!r}")
        submission.submitted = _moment(str(manifest.get("created", "")))
        _flag_extra(submission, names, course)
        chosen = _choose(names, submission.lab, submission, lambda name: _member(archive, name))
        sums = manifest.get("files")
        for name, expected in sums.items() if isinstance(sums, dict) else ():
            if name in names and hashlib.sha256(archive.read(name)).hexdigest() != expected:
                submission.flags.append(f"tampered: {name} is not what its manifest was made for")
        if not manifest:
            submission.flags.append("no readable manifest.json")
        return _member(archive, chosen)


def _member(archive: zipfile.ZipFile, name: str) -> str:
    with archive.open(name) as file:
        data = file.read(MAX_BYTES + 1)
    if len(data) > MAX_BYTES:
        raise Unusable(f"{name} has over {MAX_BYTES / 1e6:.0f} MB")
    return _decoded(data, name)


def _manifest(archive: zipfile.ZipFile) -> dict:
    try:
        manifest = json.loads(archive.read("manifest.json"))
    except (KeyError, ValueError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _names_of(archive: Path, folder: Path, labs: list[str]) -> tuple[str, str]:
    """(student, lab) of a zip file: the folder it lies in, then `<student>-<lab>.zip`, then its manifest.

    The instructor's own folder comes first: a manifest says what its author likes.
    """
    student, lab = "", ""
    if archive.parent != folder:
        student = archive.relative_to(folder).parts[0]
    by_name = [(archive.stem.removesuffix(f"-{known}"), known) for known in labs if archive.stem.endswith(f"-{known}")]
    if by_name:
        student, lab = student or by_name[0][0], by_name[0][1]
    try:
        with zipfile.ZipFile(archive) as opened:
            manifest = _manifest(opened)
            inside = {Path(name).stem for name in opened.namelist() if name.endswith(".ipynb")}
    except (zipfile.BadZipFile, OSError, RuntimeError):
        manifest, inside = {}, set()
    lab = lab or str(manifest.get("lab", "")) or next((known for known in labs if known in inside), "")
    return student or str(manifest.get("student", "")) or archive.stem, lab


def _flag_extra(submission: Submission, names: list[str], course: Course) -> None:
    """Name files that are not on the release's list: none of them is ever in the kernel's reach."""
    known = {str(p) for p in course.released_files(submission.lab)} | IGNORED
    extra = [n for n in names if n not in known and not n.endswith(".ipynb") and not n.startswith(".")]
    if extra:
        submission.flags.append(f"left out: {', '.join(extra[:5])}{' ...' if len(extra) > 5 else ''}")


def _choose(names: list[str], lab: str, submission: Submission, read) -> str:
    """The notebook to grade: the one of the right name, else the only one that is a copy of the lab."""
    if f"{lab}.ipynb" in names:
        return f"{lab}.ipynb"
    notebooks = [n for n in names if n.endswith(".ipynb") and ".ipynb_checkpoints" not in n]
    copies = [n for n in notebooks if _is_lab(read(n), lab)]
    if len(copies) == 1:
        submission.flags.append(f"renamed: {copies[0]} was taken for {lab}.ipynb")
        return copies[0]
    raise Unusable(f"no {lab}.ipynb; the notebooks here: {', '.join(notebooks) or 'none'}")


def _is_lab(text: str, lab: str) -> bool:
    return lab in text or '"grade_id"' in text


def clean_notebook(text: str) -> NotebookNode:
    """A notebook with cell ids, types, sources and nbgrader metadata of the given one, and nothing else. Else Unusable.

    Outputs, attachments, tags ("skip-execution" is worth full marks) and whatever else JSON can hold are dropped.
    """
    try:
        raw = json.loads(text)
        cells = [_clean_cell(c) for c in raw["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"the notebook is not readable: {type(error).__name__}: {str(error)[:200]}") from None
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.nbformat_minor = 5
    return notebook


def _clean_cell(raw: dict) -> NotebookNode:
    kind = raw["cell_type"] if raw["cell_type"] in ("code", "markdown", "raw") else "raw"
    source = raw["source"] if isinstance(raw["source"], str) else "".join(raw["source"])
    source = source.encode("utf-8", "replace").decode("utf-8").replace("\x00", "")
    meta = (raw.get("metadata") or {}).get("nbgrader")
    kept = {"nbgrader": meta} if isinstance(meta, dict) and isinstance(meta.get("grade_id"), str) else {}
    cell = {"cell_type": kind, "id": str(raw.get("id", ""))[:64], "metadata": kept, "source": source}
    return nbformat.from_dict(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))


def _timestamp(path: Path) -> datetime | None:
    return _moment(path.read_text(encoding="utf-8", errors="replace").strip()) if path.is_file() else None


def _moment(text: str) -> datetime | None:
    """A time in UTC without a zone, as the gradebook keeps it; None if it cannot be read."""
    try:
        return parse_utc(text)
    except (ValueError, OverflowError):
        return None
