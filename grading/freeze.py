"""Keeps the graded cells of a lab as they are while submissions exist."""

from __future__ import annotations

from pathlib import Path

import nbformat


class FrozenError(ValueError):
    """The set of graded cells would change although submissions exist."""


def check_frozen(root: Path, lab: str, solved: str) -> None:
    """Raise FrozenError if the notebook text `solved` has other graded cells than the submissions in the gradebook.

    root: of the course. nbgrader refuses this too, but only after it has deleted the release.
    """
    db = root / "grading" / "gradebook.db"
    if not db.exists():
        return
    from nbgrader.api import Gradebook, MissingEntry

    from grading.nbgrader_config import course_config

    with Gradebook(f"sqlite:///{db}", course_config().CourseDirectory.course_id) as book:
        try:
            assignment = book.find_assignment(lab)
        except MissingEntry:
            return
        count = len(assignment.submissions)
        kept = {c.name for n in assignment.notebooks for c in (*n.grade_cells, *n.solution_cells)}
    metas = [c.metadata.get("nbgrader", {}) for c in nbformat.reads(solved, 4).cells]
    new = {m["grade_id"] for m in metas if m.get("grade") or m.get("solution")}
    if count and kept != new:
        changes = [f"+{i}" for i in sorted(new - kept)] + [f"-{i}" for i in sorted(kept - new)]
        raise FrozenError(
            f"{lab} has {count} submissions in {db}, so its questions are frozen, and this build changes them: "
            f"{', '.join(changes)}. Make it a lab of a new name, or move the gradebook away and grade anew."
        )
