"""Puts a submitted notebook back into the shape of the release: ids, points, timeouts, locked cells, missing cells.

nbgrader trusts a submission's metadata; a copied, split, stripped or renamed cell stops its whole batch, or loses
points without a word. Here the release decides: a cell is known by its cell id, then by its grade_id, then by its text.
"""

from __future__ import annotations

import copy
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbgrader.preprocessors import NbGraderPreprocessor
from traitlets import Unicode

from grading.clean import VALID_ID
from labkit.cells import names

NOTES = "inference_camp_repairs"  # notebook metadata; overwritten here, so that a student's own is never believed


class RepairCells(NbGraderPreprocessor):
    """First of the sanitizers. Leaves what it did in the notebook's metadata, one sentence per repair."""

    labs_directory = Unicode(help="folder of the released labs").tag(config=True)

    def preprocess(self, nb: NotebookNode, resources: dict) -> tuple[NotebookNode, dict]:
        lab = resources["nbgrader"]["notebook"]
        release = nbformat.read(Path(self.labs_directory) / lab / f"{lab}.ipynb", 4)
        nb.cells, notes = repair(nb.cells, release.cells)
        nb.metadata = nbformat.from_dict({"kernelspec": release.metadata.kernelspec, NOTES: notes})
        nb.nbformat, nb.nbformat_minor = 4, 5
        for note in notes:
            self.log.warning("RepairCells: %s", note)
        return nb, resources


def repair(submitted: list[NotebookNode], release: list[NotebookNode]) -> tuple[list[NotebookNode], list[str]]:
    """The submitted cells with everything that the release decides restored, and what was restored."""
    graded = [c for c in release if "nbgrader" in c.metadata]
    found, notes = _match(submitted, graded)
    owner = {id(cell): grade_id for grade_id, cell in found.items()}
    by_name = {c.metadata.nbgrader.grade_id: c for c in graded}
    cells: list[NotebookNode] = []
    for cell in submitted:
        source = by_name.get(owner.get(id(cell), ""))
        cells.append(_restored(cell, source))
        if source is not None and _is_edited(cell, source):
            cells.append(_restored(cell, None))
            notes.append(
                f"{source.metadata.nbgrader.grade_id}: it was edited, and what the student wrote runs after it"
            )
    notes += [
        f"{grade_id}: its points were changed"
        for grade_id, cell in found.items()
        if _meta(cell).get("points") != by_name[grade_id].metadata.nbgrader.get("points") and _meta(cell)
    ]
    return _with_missing(cells, graded, notes), notes


def _meta(cell: NotebookNode) -> dict:
    meta = cell.metadata.get("nbgrader")
    return meta if isinstance(meta, dict) else {}


def _match(submitted: list[NotebookNode], graded: list[NotebookNode]) -> tuple[dict[str, NotebookNode], list[str]]:
    """Which submitted cell is which cell of the release, by grade_id."""
    found: dict[str, NotebookNode] = {}
    notes = []
    for source in graded:
        grade_id = source.metadata.nbgrader.grade_id
        taken = {id(c) for c in found.values()}
        free = [c for c in submitted if id(c) not in taken]
        same_id = [c for c in free if c.get("id") == source.id]
        same_name = [c for c in free if _meta(c).get("grade_id") == grade_id]
        same_text = [c for c in free if not _meta(c) and _same_role(c, source)]
        candidates = [*(c for c in same_name if c not in same_id), *same_id] or same_text
        if len(candidates) > 1:
            notes.append(f"{grade_id}: of {len(candidates)} copies one was graded")
        if candidates:
            found[grade_id] = _best(candidates, source)
            if _meta(found[grade_id]).get("grade_id") != grade_id:
                notes.append(f"{grade_id}: its metadata was restored")
    return found, notes


def _same_role(cell: NotebookNode, source: NotebookNode) -> bool:
    """A stripped cell: the same text where the release locks it, a cell that defines the same names where not."""
    if source.metadata.nbgrader.locked:
        return _without_margins(cell.source) == _without_margins(source.source)
    wanted = names(source.source)[0]
    return source.cell_type == "code" and bool(wanted) and wanted <= names(cell.source)[0]


def _is_edited(cell: NotebookNode, source: NotebookNode) -> bool:
    """Whether a student has written into a cell that the release locks: an import among those of the setup cell, say.

    The release's text is put back; what was added there is work all the same, and runs as a cell of the student's own.
    """
    given = cell.cell_type == source.cell_type == "code" and source.metadata.nbgrader.locked
    return given and not source.metadata.nbgrader.grade and not _same_role(cell, source) and bool(cell.source.strip())


def _without_margins(text: str) -> str:
    """Without blanks at the ends of lines and empty lines at the end, which editors add and take away."""
    return "\n".join(line.rstrip() for line in text.rstrip().split("\n"))


def _best(candidates: list[NotebookNode], source: NotebookNode) -> NotebookNode:
    """Of several copies the one that defines what the release's cell defines, else the last."""
    defining = [c for c in candidates if names(source.source)[0] <= names(c.source)[0]]
    return (defining or candidates)[-1]


def _restored(cell: NotebookNode, source: NotebookNode | None) -> NotebookNode:
    """The student's text in the release's cell; a cell that is not of the release keeps its text alone."""
    if source is None:
        kept = {"id": str(cell.get("id")), "cell_type": cell.cell_type, "metadata": {}, "source": cell.source}
    else:
        kept = copy.deepcopy({k: source[k] for k in ("id", "cell_type", "metadata")}) | {"source": cell.source}
    if kept["cell_type"] == "code":
        kept |= {"outputs": [], "execution_count": None}
    return nbformat.from_dict(kept)


def holds_answers(submitted: list[NotebookNode], release: list[NotebookNode]) -> bool:
    """Whether any answer cell of the release is there: a notebook without one is another lab's, or none."""
    graded = [c for c in release if _meta(c).get("solution")]
    return not graded or bool(_match(submitted, graded)[0])


def _put_back(source: NotebookNode, cells: list[NotebookNode], notes: list[str]) -> NotebookNode:
    """The release's cell, or an empty one where another cell holds the answer: the starter would undo it."""
    cell = copy.deepcopy(source)
    grade_id, wanted = source.metadata.nbgrader.grade_id, names(source.source)[0]
    open_cells = [c for c in cells if c.cell_type == "code" and not _meta(c).get("locked")]
    if _meta(source).get("solution") and wanted and any(wanted <= names(c.source)[0] for c in open_cells):
        cell.source = "# Another cell holds this answer."
        notes.append(f"{grade_id}: its cell was missing, and another cell holds the answer")
    else:
        notes.append(f"{grade_id}: the cell was missing and was put back")
    return cell


def _with_missing(cells: list[NotebookNode], graded: list[NotebookNode], notes: list[str]) -> list[NotebookNode]:
    """Put each missing cell of the release behind the one that stands before it there."""
    position = 0
    for source in graded:
        grade_id = source.metadata.nbgrader.grade_id
        at = next((n for n, c in enumerate(cells) if _meta(c).get("grade_id") == grade_id), None)
        if at is None:
            cells.insert(position, _put_back(source, cells, notes))
            at = position
        position = at + 1
    taken = {source.id for source in graded}
    for n, cell in enumerate(cells):  # nbformat wants ids that differ, and the release's cells keep theirs
        if "nbgrader" not in cell.metadata and (cell.id in taken or not VALID_ID.fullmatch(cell.id)):
            cell["id"] = f"extra{n}"
        taken.add(cell.id)
    return cells
