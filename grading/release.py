"""The student's bundle: what `labkit release DIR` writes. The labs, the code they import, and how to set them up."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from grading.build import build, labs

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("docs", "kernels", "labkit", "labs", "locks", "tools")
FILES = (
    "README.md",
    "AGENTS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "pyproject.toml",
    ".gitignore",
)
LEFT_OUT = {"conftest.py"}  # it grades the solutions


def bundle_files(root: Path = ROOT) -> Iterator[Path]:
    """The files of the bundle, relative to the camp. FileNotFoundError for a folder or file that should be there."""
    for name in FILES:
        if not (root / name).is_file():
            raise FileNotFoundError(2, "the bundle needs this file", str(root / name))
        yield Path(name)
    for folder in FOLDERS:
        found = sorted(p.relative_to(root) for p in (root / folder).rglob("*") if p.is_file())
        if not found:
            raise FileNotFoundError(2, "the bundle needs this folder", str(root / folder))
        yield from (p for p in found if p.name not in LEFT_OUT and not _is_hidden(p))


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def write_bundle(target: Path, root: Path = ROOT) -> list[Path]:
    """Write the student's bundle to `target`, all of it or nothing; gives its files, relative to `target`.

    ValueError if `target` is not empty or lies inside a folder of the bundle, or if a lab's notebook is out of date.
    """
    target = target.absolute()
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise ValueError(f"{target} is not an empty folder; the bundle is written to a new one")
    if any(target.is_relative_to(root / folder) for folder in FOLDERS):
        raise ValueError(f"{target} lies inside the camp's own {target.relative_to(root).parts[0]}/")
    stale = [str(p.relative_to(root)) for lab in labs() for p in build(lab, check_only=True)]
    if stale:
        raise ValueError(f"out of date, run `labkit build` first: {', '.join(stale)}")
    target.parent.mkdir(parents=True, exist_ok=True)
    files = list(bundle_files(root))
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".bundle-") as scratch:
        for path in files:
            (Path(scratch) / "bundle" / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(root / path, Path(scratch) / "bundle" / path)
        if target.exists():
            target.rmdir()
        (Path(scratch) / "bundle").rename(target)
    return files
