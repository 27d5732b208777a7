"""Takes from a submitted notebook what grading needs, and drops the rest before any library reads it."""

from __future__ import annotations

import json
import re

import nbformat
from nbformat import NotebookNode

from grading.places import Unusable

VALID_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")  # as nbformat 4.5 has it


def clean_notebook(text: str) -> NotebookNode:
    """A notebook with cell ids, types, sources and nbgrader metadata of the given one, and nothing else. Else Unusable.

    Outputs, attachments, tags ("skip-execution" is worth full marks) and whatever else JSON can hold are dropped. Cells
    without a valid id of their own (nbformat 4.4 has none) get one.
    """
    try:
        raw = json.loads(text)
        if "cells" not in raw and "worksheets" in raw:
            raise Unusable("the notebook is in the format of 2014, nbformat 3: open it in Jupyter and save it again")
        cells = [_clean_cell(c) for c in raw["cells"]]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unusable(f"the notebook is not readable: {type(error).__name__}: {str(error)[:200]}") from None
    _give_ids(cells)
    notebook = nbformat.v4.new_notebook(cells=cells)
    notebook.nbformat_minor = 5
    return notebook


def _clean_cell(raw: dict) -> NotebookNode:
    kind = "code" if raw["cell_type"] == "code" else "markdown"  # pages show a raw cell as it stands, scripts and all
    source = raw["source"] if isinstance(raw["source"], str) else "".join(raw["source"])
    meta = (raw.get("metadata") or {}).get("nbgrader")
    kept = {"nbgrader": _clean_meta(meta)} if isinstance(meta, dict) and isinstance(meta.get("grade_id"), str) else {}
    cell = {"cell_type": kind, "id": str(raw.get("id", "")), "metadata": kept, "source": _encodable(source)}
    return nbformat.from_dict(cell | ({"outputs": [], "execution_count": None} if kind == "code" else {}))


def _clean_meta(meta: dict) -> dict:
    return {
        _encodable(key): _encodable(value) if isinstance(value, str) else value
        for key, value in meta.items()
        if isinstance(value, str | int | float | bool)
    }


def _encodable(text: str) -> str:
    """Without half characters, which JSON can hold and no file can, and without NUL, which Python refuses.

    Lines end as in the release, whatever the editor and its system.
    """
    return text.encode("utf-8", "replace").decode("utf-8").replace("\x00", "").replace("\r\n", "\n").replace("\r", "\n")


def _give_ids(cells: list[NotebookNode]) -> None:
    taken = {cell.id for cell in cells}
    seen: set[str] = set()
    for n, cell in enumerate(cells):
        if cell.id in seen or not VALID_ID.fullmatch(cell.id):
            # Longer than any id of a release, so that it matches none by chance.
            cell["id"] = next(i for k in range(len(cells) + 1) if (i := f"without-an-id-{n}-{k}") not in taken)
            taken.add(cell.id)
        seen.add(cell.id)
