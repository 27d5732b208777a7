"""Finds submissions in a folder, and looks each over before any of it is run.

Layouts: `DIR/<student>/<lab>/<lab>.ipynb` (nbgrader's own), and zip files anywhere in DIR that hold `<lab>.ipynb` and
the `manifest.json` of `labkit submit`. Trouble with one is a sentence about that one, and nothing is passed over in
silence.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
import unicodedata
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path, PurePosixPath

import nbformat
from nbgrader.utils import parse_utc

from grading.clean import clean_notebook
from grading.course import Course
from grading.places import MANIFEST, MAX_MANIFEST, Archive, Folder, Place, Unusable
from labkit.workspace import STUDENT

ARCHIVES = (".7z", ".rar", ".tar", ".gz", ".tgz", ".bz2", ".xz")
TIMESTAMP = "timestamp.txt"
CLOCK_ERROR = timedelta(hours=1)  # by which a student's clock may be fast


@dataclass
class Submission:
    """One student's work on one lab. problem: why it cannot be graded, or "". flags: what to know of it.

    claimed: nothing but the manifest inside it says whose it is.
    """

    student: str
    lab: str
    source: Path
    notebook: str = ""
    submitted: datetime | None = None
    problem: str = ""
    flags: list[str] = field(default_factory=list)
    claimed: bool = False


def find_submissions(folder: Path, course: Course, labs: list[str]) -> list[Submission]:
    """Every submission of these labs in `folder`; of several by one student the newest that can be graded.

    One whose lab cannot be told is listed as of lab "?". ValueError if there is no such folder.
    """
    if not folder.is_dir():
        raise ValueError(f"{folder} is not a folder of submissions")
    known = course.labs()
    rivals: dict[tuple[str, str], list[Submission]] = {}
    everything = list(_everything(folder, course, known))
    for found in [*everything, *_others(folder, {s.source for s in everything})]:
        found.student = composed(found.student)
        if found.lab not in known:
            found.lab = labs[0] if len(labs) == 1 else "?"
        if found.lab in labs or found.lab == "?":
            rivals.setdefault((found.student, found.lab), []).append(found)
    return [_chosen(rivals[key], folder) for key in sorted(rivals)]


def _chosen(rivals: list[Submission], folder: Path) -> Submission:
    """The newest that can be graded. Its flags say what else there is."""
    *others, best = sorted(rivals, key=lambda s: (not s.problem, s.submitted or datetime.min))
    if others:
        whose = "; nothing but its manifest says whose it is" if best.claimed else ""
        best.flags.append(f"of {len(rivals)} this one counts: {_told(best, folder)}{whose}")
    for other in reversed(others):
        trouble = "; ".join(filter(None, [other.problem, *(f for f in other.flags if f.startswith("tampered"))]))
        best.flags.append(f"also handed in: {_told(other, folder)}{trouble and f' ({trouble})'}")
    return best


def _told(submission: Submission, folder: Path) -> str:
    when = f" of {submission.submitted:%Y-%m-%d %H:%M} UTC" if submission.submitted else ""
    return f"{submission.source.relative_to(folder)}{when}"


def _everything(folder: Path, course: Course, known: list[str]) -> Iterator[Submission]:
    """Submissions of all labs, then notebooks that lie where none is looked for."""
    for place in sorted(p for p in folder.glob("*/*") if p.is_dir() and _spelled(p.name, known)):
        yield from _from_folder(place, course, known)
    for archive in sorted(p for p in folder.rglob("*") if p.suffix.lower() == ".zip" and p.is_file()):
        if not archive.name.startswith("."):
            yield _from_zip(archive, folder, course, known)
    for name in Folder(folder).notebooks:
        parts = PurePosixPath(name).parts
        if len(parts) < 3 or not _spelled(parts[1], known):
            stem = PurePosixPath(name).stem
            yield Submission(
                parts[0] if len(parts) > 1 else stem, _spelled(stem, known), folder / name,
                problem=f"{name} lies where no submission is looked for: <student>/<lab>/<lab>.ipynb, or a zip file",
            )  # fmt: skip


def _others(folder: Path, found: set[Path]) -> Iterator[Submission]:
    """A row for each folder in which nothing was found, and for each archive that is none of ours."""
    for place in sorted(p for p in folder.iterdir() if not p.name.startswith((".", "__MACOSX"))):
        if place.is_dir() and not any(source.is_relative_to(place) for source in found):
            there = _some(Folder(place).names)
            yield Submission(place.name, "", place, problem=f"no notebook and no zip file is in it; there: {there}")
        elif place.suffix.lower() in ARCHIVES:
            problem = f"{place.name} is no zip file: unpack it, and pack it as one"
            yield Submission(place.name.partition(".")[0], "", place, problem=problem)


def composed(name: str) -> str:
    """A name with each accented letter as one character: macOS writes two, and the roster may hold either."""
    return unicodedata.normalize("NFC", name)


def _spelled(text: str, known: list[str]) -> str:
    """The lab of this name, whatever its case, dashes and blanks; "" if there is none."""
    return next((lab for lab in known if _letters(lab) == _letters(text)), "")


def _letters(text: str) -> str:
    return re.sub(r"[\W_]+", "", text).casefold()


@contextlib.contextmanager
def _guarded(submission: Submission) -> Iterator[None]:
    """Whatever a submission raises is that submission's problem."""
    try:
        yield
    except Unusable as error:
        submission.problem = str(error)
    except Exception as error:  # students choose every byte that is read here: no list of exceptions is complete
        submission.problem = f"{submission.source.name} cannot be read: {type(error).__name__}: {error}"[:500]


def _from_folder(path: Path, course: Course, known: list[str]) -> Iterator[Submission]:
    submission = Submission(path.parent.name, _spelled(path.name, known), path)
    with _guarded(submission):
        if path.is_symlink() or path.parent.is_symlink():
            raise Unusable(f"{path.parent.name}/{path.name} is a link, not a folder")
        place = Folder(path)
        if not place.notebooks and any(name.lower().endswith(".zip") for name in place.names):
            return  # a folder around a zip file, which is found by itself
        if path.name != submission.lab:
            submission.flags.append(f"the folder {path.name!r} was taken for {submission.lab}")
        if TIMESTAMP in place.names:
            submission.submitted = _moment(place.read(TIMESTAMP, MAX_MANIFEST).decode("utf-8", "replace").strip())
        _take(submission, place, {}, course)
    yield submission


def _from_zip(path: Path, folder: Path, course: Course, known: list[str]) -> Submission:
    """Whose it is says the folder it lies in, then `<student>-<lab>.zip`, then its manifest.

    The instructor's own folder comes first: a manifest says what its author likes.
    """
    student, lab = _named(path, folder, known)
    submission = Submission(student or path.stem, lab, path)
    with _guarded(submission), zipfile.ZipFile(path) as opened:
        place = Archive(opened)
        manifest = _manifest(place)
        says = manifest.get("student")
        if student and isinstance(says, str) and says != student:
            submission.flags.append(f"the manifest says that it is by {says[:64]!r}")
        elif not student and isinstance(says, str) and says:
            submission.student, submission.claimed = says[:100], True
        submission.lab = lab or _lab_inside(manifest, place, known)
        if not submission.lab:
            raise Unusable(f"no lab's notebook is in this zip file; there: {_some(place.notebooks)}")
        if isinstance(manifest.get("lab"), str) and manifest["lab"] != submission.lab:
            submission.flags.append(f"the manifest says that it is of {manifest['lab'][:64]!r}")
        _set_time(submission, manifest)
        _take(submission, place, manifest, course)
        if not manifest:
            submission.flags.append(f"no readable {MANIFEST}")
    return submission


def _named(path: Path, folder: Path, known: list[str]) -> tuple[str, str]:
    student = path.relative_to(folder).parts[0] if path.parent != folder else ""
    for lab in known:
        if path.stem.endswith(f"-{lab}"):
            return student or path.stem.removesuffix(f"-{lab}"), lab
    return student, ""


def _manifest(place: Place) -> dict:
    try:
        manifest = json.loads(place.read(MANIFEST, MAX_MANIFEST)) if MANIFEST in place.names else {}
    except (ValueError, RecursionError):
        return {}
    return manifest if isinstance(manifest, dict) else {}


def _lab_inside(manifest: dict, place: Place, known: list[str]) -> str:
    """The lab that the manifest names, or a notebook; another spelling is believed only where no exact name stands."""
    names = [str(manifest.get("lab", "")), *(PurePosixPath(name).stem for name in place.notebooks)]
    return next((n for n in names if n in known), "") or next(filter(None, (_spelled(n, known) for n in names)), "")


def _set_time(submission: Submission, manifest: dict) -> None:
    created = _moment(str(manifest.get("created", "")))
    if created and created > datetime.now(UTC).replace(tzinfo=None) + CLOCK_ERROR:
        submission.flags.append(
            f"tampered: made at {created:%Y-%m-%d %H:%M} UTC by its manifest, which is in the future"
        )
    else:
        submission.submitted = created


def _moment(text: str) -> datetime | None:
    """A time in UTC without a zone, as the gradebook keeps it; None if it cannot be read."""
    try:
        return parse_utc(text)
    except (ValueError, OverflowError):
        return None


def _take(submission: Submission, place: Place, manifest: dict, course: Course) -> None:
    """Read the notebook, and note what else is to know of the place."""
    submission.student = composed(submission.student)
    if not STUDENT.fullmatch(submission.student):
        raise Unusable(f"{submission.student!r} is not a student's name: letters, digits and ._@+- only")
    chosen = _choose(place, submission)
    _flag_extra(submission, place, chosen, course)
    sums = manifest.get("files")
    expected = sums.get(chosen) if isinstance(sums, dict) else None
    if expected is not None and hashlib.sha256(place.read(chosen)).hexdigest() != expected:
        submission.flags.append(f"tampered: {chosen} is not what its manifest was made for")
    submission.notebook = nbformat.writes(clean_notebook(place.text(chosen)))


def _choose(place: Place, submission: Submission) -> str:
    """The notebook to grade: the one of the right name, else the only one that is a copy of the lab."""
    wanted = f"{submission.lab}.ipynb"
    exact = [name for name in place.notebooks if PurePosixPath(name).name == wanted]
    if wanted in exact or len(exact) == 1:
        return wanted if wanted in exact else exact[0]
    copies = [name for name in place.notebooks if _is_lab(place.text(name), submission.lab)]
    if len(copies) == 1:
        submission.flags.append(f"renamed: {copies[0]} was taken for {wanted}")
        return copies[0]
    raise Unusable(f"no {wanted}; the notebooks here: {_some(place.notebooks)}")


def _is_lab(text: str, lab: str) -> bool:
    return lab in text or '"grade_id"' in text


def _flag_extra(submission: Submission, place: Place, chosen: str, course: Course) -> None:
    """Name files that are not on the release's list: none of them is ever in the kernel's reach."""
    known = {TIMESTAMP, MANIFEST} | {path.as_posix() for path in course.released_files(submission.lab)}
    folder = chosen.rpartition("/")[0]
    beside = [name.removeprefix(f"{folder}/") for name in place.names if not name.endswith(".ipynb")]
    extra = [name for name in beside if name not in known]
    if extra:
        submission.flags.append(f"left out: {_some(extra)}")


def _some(names: list[str]) -> str:
    return (", ".join(names[:5]) or "none") + (" ..." if len(names) > 5 else "")
