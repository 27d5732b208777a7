"""Where a course lives. The camp's own tree is one; a course of its own adds labs, checks and hidden checks to it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import grading.hidden
import labkit.checks
from labkit.checks import registry

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Course:
    """A tree with `solutions/<lab>/<lab>.ipynb`, `labs/<lab>/<lab>.ipynb`, and the run-time files in `grading/`.

    A course outside the camp's tree may hold `labkit/checks/lab*/`, `kernels/` and `grading/hidden/` of its own: they
    are added to the camp's by `activate` in this process, and by `grading.sandbox.camp_copy` in the student's.
    """

    root: Path = ROOT

    def labs(self) -> list[str]:
        """Slugs of the labs that have a release, in order."""
        return sorted(path.stem for path in (self.root / "labs").glob("*/*.ipynb") if path.stem == path.parent.name)

    def release(self, lab: str) -> Path:
        """The notebook that students got."""
        return self.root / "labs" / lab / f"{lab}.ipynb"

    def released_files(self, lab: str) -> list[Path]:
        """What a lab's folder holds beside the notebook (data, helpers), relative to that folder."""
        folder = self.root / "labs" / lab
        return sorted(p.relative_to(folder) for p in folder.rglob("*") if p.is_file() and p.suffix != ".ipynb")

    @property
    def gradebook(self) -> Path:
        return self.root / "grading" / "gradebook.db"

    def activate(self) -> Course:
        """Make this course's own questions and hidden checks findable in this process. Gives itself."""
        if self.root != ROOT:
            _extend(labkit.checks.__path__, self.root / "labkit" / "checks")
            _extend(grading.hidden.__path__, self.root / "grading" / "hidden")
            registry._found.clear()
        return self


def _extend(path: list[str], folder: Path) -> None:
    if folder.is_dir() and str(folder) not in path:
        path.append(str(folder))
