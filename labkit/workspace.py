"""A student's working copies of the labs: made from the release, never overwritten, zipped for submission."""

from __future__ import annotations

import getpass
import hashlib
import io
import json
import os
import re
import zipfile
from collections import Counter
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import labkit
from labkit.cells import Cell, read_cells

RECORD = ".labkit.json"  # in a working folder: for each file, the hashes of the releases that it was given
STUDENT = re.compile(r"\w[\w.@+-]{0,63}")  # letters of any alphabet
NOBODY = {"admin", "ec2-user", "jovyan", "nobody", "root", "runner", "ubuntu", "user"}  # accounts that name no student


class CampError(Exception):
    """What keeps a command from going on, as one sentence for the person who typed it."""


def camp_root() -> Path:
    """The folder with labs/: the one that labkit lies in, else the nearest from the current folder upwards."""
    here = Path.cwd()
    for folder in (Path(labkit.__file__).resolve().parents[1], here, *here.parents):
        if labs_of(folder):
            return folder
    raise CampError("no labs/ folder here or above: run this in the folder of the camp that you cloned or unpacked")


def labs_of(root: Path) -> list[str]:
    """Slugs of the labs that `root` holds, in order."""
    return sorted(p.stem for p in (root / "labs").glob("*/*.ipynb") if p.stem == p.parent.name)


def find_lab(name: str, root: Path) -> str:
    """The slug for "lab1_paged_attention", "lab1" or "1". CampError names the labs that exist."""
    known = labs_of(root)
    number = name if name.startswith("lab") else f"lab{name}"
    found = [lab for lab in known if name == lab or lab.split("_")[0] == number]
    if not found:
        raise CampError(f"no lab {name!r}; there are: {', '.join(known)}")
    return found[0]


def release_notebook(lab: str, root: Path) -> Path:
    """The release notebook of a lab."""
    return root / "labs" / lab / f"{lab}.ipynb"


def released_files(lab: str, root: Path) -> list[Path]:
    """The files of a lab's release, relative to its folder; caches and hidden files are none."""
    folder = root / "labs" / lab
    found = [p.relative_to(folder) for p in folder.rglob("*") if p.is_file()]
    return sorted(p for p in found if not any(part.startswith((".", "__pycache__")) for part in p.parts))


def working_copy(lab: str, work: Path) -> Path:
    """The student's notebook. CampError if it was not made yet, or was renamed."""
    notebook = work / lab / f"{lab}.ipynb"
    if notebook.is_file():
        return notebook
    others = sorted(p.name for p in notebook.parent.glob("*.ipynb") if ".new" not in p.name)
    if others:
        raise CampError(f"{notebook} is missing; was it renamed? There is: {', '.join(others)}")
    raise CampError(f"no working copy {notebook}: make it with `labkit start {lab}`, or name a notebook file")


def last_worked_on(work: Path, root: Path) -> str:
    """The lab whose working copy was saved last, or the first lab."""
    copies = [p for lab in labs_of(root) if (p := work / lab / f"{lab}.ipynb").is_file()]
    return max(copies, key=lambda p: p.stat().st_mtime).stem if copies else labs_of(root)[0]


def make_copy(lab: str, work: Path, root: Path) -> list[str]:
    """Copy a lab's release to `work/<lab>`; gives lines that say what was done.

    A file that is there already is the student's and is kept. A release that the student has not been given yet is put
    beside it, as <name>.new.<suffix>.
    """
    if work.resolve().is_relative_to((root / "labs").resolve()):
        raise CampError(f"--work {work}: work outside of labs/, which the next release replaces")
    folder = work / lab
    folder.mkdir(parents=True, exist_ok=True)
    given = _read_record(folder)
    lines = [_bring(name, root / "labs" / lab / name, folder / name, given) for name in released_files(lab, root)]
    _write(folder / RECORD, json.dumps(given, indent=1, sort_keys=True).encode())
    return [line for line in lines if line]


def _bring(name: Path, release: Path, mine: Path, given: dict[str, list[str]]) -> str:
    data, seen = release.read_bytes(), given.setdefault(str(name), [])
    fresh = _sha256(data)
    if not mine.exists():
        _write(mine, data)
        said = f"copied {name} to {mine.parent}"
    elif fresh in seen or _sha256(mine.read_bytes()) == fresh:
        said = f"kept your {mine}" if mine.suffix == ".ipynb" else ""
    else:
        beside = _place_beside(mine, {*seen, fresh})
        _write(beside, data)
        said = f"kept your {mine}; a newer release of it is beside it: {beside.name}"
    if fresh not in seen:
        seen.append(fresh)
    return said


def _place_beside(mine: Path, releases: set[str]) -> Path:
    """<name>.new.<suffix>, or .new2 and so on where the student has worked in that one."""
    for number in range(1, 1000):
        place = mine.with_name(f"{mine.stem}.new{number if number > 1 else ''}{mine.suffix}")
        if not place.exists() or _sha256(place.read_bytes()) in releases:
            return place
    raise CampError(f"too many releases lie beside {mine}: remove those that you do not need")


def _read_record(folder: Path) -> dict[str, list[str]]:
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        return {str(name): [str(sha) for sha in shas] for name, shas in record.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}  # then every release counts as new, and is put beside


def _write(path: Path, data: bytes) -> None:
    """Write all of a file or none of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    half = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        half.write_bytes(data)
        half.replace(path)
    finally:
        half.unlink(missing_ok=True)


def _sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass(frozen=True)
class Submission:
    """A written zip file, and lines for its author: what was left out, what is not answered yet."""

    path: Path
    notes: list[str]


def submit(lab: str, work: Path, root: Path, student: str, out: Path, force: bool = False) -> Submission:
    """Write `out/<student>-<lab>.zip`: the files of the release as the student has them, and manifest.json.

    An earlier zip of the same name is replaced. CampError, one line a problem, when the work does not fit the release
    and `force` is not given.
    """
    notebook = working_copy(lab, work)
    names = released_files(lab, root)
    problems = [
        f"{name} of the release is missing in {work / lab}" for name in names if not (work / lab / name).is_file()
    ]
    problems += notebook_problems(notebook, release_notebook(lab, root))
    if problems and not force:
        raise CampError("\n".join([*problems, "nothing was written; --force submits in spite of it"]))
    files = {str(name): (work / lab / name).read_bytes() for name in names if (work / lab / name).is_file()}
    manifest = {
        "lab": lab,
        "student": student,
        "camp_version": labkit.__version__,
        "files": {name: _sha256(data) for name, data in files.items()},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    path = out / f"{student}-{lab}.zip"
    _write(path, _zipped(files | {"manifest.json": json.dumps(manifest, indent=1).encode()}))
    return Submission(path, problems + _notes(notebook, names, work / lab, release_notebook(lab, root)))


def _zipped(files: dict[str, bytes]) -> bytes:
    sink = io.BytesIO()
    with zipfile.ZipFile(sink, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return sink.getvalue()


def notebook_problems(notebook: Path, release: Path) -> list[str]:
    """What makes a notebook differ from its release in a way that grading would have to repair, one sentence each."""
    try:
        present = Counter(c.id for c in read_cells(notebook))
    except ValueError as error:
        return [str(error)]
    graded = [c.id for c in read_cells(release) if _is_graded(c)]
    gone, twice = [c for c in graded if not present[c]], [c for c in graded if present[c] > 1]
    problems = (
        [f"cells gone from {notebook.name}, to be copied back from the release: {', '.join(gone)}"] if gone else []
    )
    return problems + (
        [f"cells that {notebook.name} holds more than once, keep one: {', '.join(twice)}"] if twice else []
    )


def _is_graded(cell: Cell) -> bool:
    return cell.points is not None or cell.is_solution


def _notes(notebook: Path, names: list[Path], folder: Path, release: Path) -> list[str]:
    extra = sorted(
        p.name for p in folder.iterdir() if not p.name.startswith(".") and Path(p.name).parts[0] not in _tops(names)
    )
    notes = [f"left out, since the release has no such file: {', '.join(extra)}"] if extra else []
    try:
        mine = {c.id: c.source for c in read_cells(notebook)}
    except ValueError:
        return notes
    untouched = [c.id for c in read_cells(release) if c.is_solution and mine.get(c.id) == c.source]
    return notes + ([f"not answered yet: {', '.join(untouched)}"] if untouched else [])


def _tops(names: list[Path]) -> set[str]:
    return {name.parts[0] for name in names}


def student_name(given: str | None) -> str:
    """The name that a submission carries: the one given, else that of the account. CampError if it names nobody."""
    name = given or getpass.getuser()
    if not given and name in NOBODY:
        raise CampError(f"whose work is this? Give --student NAME (the account here, {name!r}, names no student)")
    if not STUDENT.fullmatch(name):
        raise CampError(f"--student {name!r}: a name is made of letters, digits and ._@+- (at most 64)")
    return name
