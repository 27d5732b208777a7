"""One source, two notebooks: solutions/<lab>/<lab>.nb.py gives the solved notebook and, through nbgrader, the release.

In the source (jupytext py:percent) a question is one cell with a short header:

    # %% question="block_allocator" points=2 hidden=2 timeout=60

The build derives the check cell and the hidden cell from it, with cell ids made from the question id, so that editing
one cell changes one place of each file. `readonly="setup"` marks a cell that grading restores.
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

import jupytext
import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from grading.freeze import check_frozen
from labkit.checks import find_question

ROOT = Path(__file__).resolve().parents[1]
KERNELSPEC = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}


def labs(root: Path = ROOT) -> list[str]:
    """Slugs of all labs, in order."""
    return sorted(path.parent.name for path in (root / "solutions").glob("*/*.nb.py"))


def solved_notebook(lab: str, root: Path = ROOT) -> str:
    """The text of solutions/<lab>/<lab>.ipynb. ValueError names a bad header or a double id."""
    source = root / "solutions" / lab / f"{lab}.nb.py"
    notebook = jupytext.read(source)
    notebook.metadata = nbformat.from_dict({"kernelspec": KERNELSPEC, "language_info": {"name": "python"}})
    notebook.cells = [cell for raw in notebook.cells for cell in _expand(raw, source)]
    _name_cells(notebook.cells, lab)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    nbformat.validate(notebook)
    return nbformat.writes(notebook) + "\n"


def _expand(cell: NotebookNode, source: Path) -> Iterator[NotebookNode]:
    header = {key: cell.metadata.pop(key) for key in list(cell.metadata)}
    question, readonly = header.get("question"), header.get("readonly")
    unknown = set(header) - {"question", "points", "hidden", "timeout", "readonly", "lines_to_next_cell"}
    if unknown:
        raise ValueError(f"{source.name}: unknown key {sorted(unknown)} in the header of cell {cell.source[:40]!r}")
    if cell.cell_type == "code":
        cell.outputs, cell.execution_count = [], None
    if readonly:
        cell.metadata["nbgrader"] = _nbgrader(readonly, locked=True)
    if question:
        cell.metadata["nbgrader"] = _nbgrader(question, solution=True)
    yield cell
    if question:
        yield _check_cell(question, cell.source, header)
        yield _hidden_cell(question, source.parent.name, header)


def _nbgrader(grade_id: str, points: float | None = None, locked: bool = False, solution: bool = False) -> NotebookNode:
    fields = {"grade": points is not None, "grade_id": grade_id, "locked": locked, "schema_version": 3}
    fields |= {"solution": solution, "task": False} | ({} if points is None else {"points": points})
    return nbformat.from_dict(fields)


def _check_cell(question: str, solution: str, header: dict) -> NotebookNode:
    declared = find_question(question)
    answer = _answer_name(solution, question)
    call = f'labkit.score(labkit.check("{question}", {answer}), points={header["points"]})'
    text = f'"""Check that {declared.about}."""\n\n{call}'
    cell = new_code_cell(text)
    cell.metadata["nbgrader"] = _nbgrader(f"{question}_check", header["points"], locked=True)
    cell.metadata["timeout"] = header.get("timeout", 60)
    return cell


def _hidden_cell(question: str, lab: str, header: dict) -> NotebookNode:
    marks = ("### BEGIN HIDDEN TESTS", f"# blackbox: {lab}:{question}", "### END HIDDEN TESTS")
    text = f"# Grading adds hidden checks of {question} here: other inputs, the same rules.\n" + "\n".join(marks)
    cell = new_code_cell(text)
    cell.metadata["nbgrader"] = _nbgrader(f"{question}_hidden", header["hidden"], locked=True)
    cell.metadata["timeout"] = header.get("timeout", 60)
    return cell


def _answer_name(solution: str, question: str) -> str:
    """What the check is called on: the function named like the question, or the class whose name is its CamelCase."""
    camel = "".join(part.capitalize() for part in question.split("_"))
    for name, opening in ((question, f"def {question}("), (camel, f"class {camel}")):
        if opening in solution:
            return name
    raise ValueError(f"question {question!r}: its cell defines neither `def {question}` nor `class {camel}`")


def _name_cells(cells: list[NotebookNode], lab: str) -> None:
    """Ids from the grade_id; a cell without one counts from the last graded cell, so that edits stay local."""
    seen: set[str] = set()
    anchor, distance = "", 0
    for cell in cells:
        grade_id = cell.metadata.get("nbgrader", {}).get("grade_id")
        anchor, distance = (grade_id, 0) if grade_id else (anchor, distance + 1)
        if grade_id in seen:
            raise ValueError(f"{lab}: the id {grade_id!r} is used twice")
        seen |= {grade_id} - {None}
        cell["id"] = hashlib.sha1(f"{lab}/{anchor}/{distance}".encode()).hexdigest()[:12]


def release_notebook(lab: str, root: Path = ROOT) -> str:
    """The text of labs/<lab>/<lab>.ipynb: what `nbgrader generate_assignment` writes, with no gradebook touched."""
    from nbgrader.converters import GenerateAssignment
    from nbgrader.coursedir import CourseDirectory
    from nbgrader.preprocessors import SaveCells

    from grading.nbgrader_config import course_config

    with tempfile.TemporaryDirectory() as folder:
        config = course_config(root)
        config.CourseDirectory.release_directory = folder
        course = CourseDirectory(config=config, assignment_id=lab, notebook_id=lab)
        converter = GenerateAssignment(coursedir=course, config=config, no_database=True, force=True)
        converter.preprocessors = [p for p in converter.preprocessors if p is not SaveCells]
        converter.log.setLevel("ERROR")
        converter.start()
        return (Path(folder) / lab / f"{lab}.ipynb").read_text(encoding="utf-8")


def build(lab: str, check_only: bool = False, root: Path = ROOT) -> list[Path]:
    """Write both notebooks of a lab; with `check_only`, write nothing. Gives the files that were (or are) out of date.

    FrozenError when submissions of the lab are in the gradebook and its graded cells would change; nothing is written.
    """
    solved, release = root / "solutions" / lab / f"{lab}.ipynb", root / "labs" / lab / f"{lab}.ipynb"
    text = solved_notebook(lab, root)
    if not check_only:
        check_frozen(root, lab, text)
    drifted = _update(solved, text, check_only)
    if drifted and check_only:  # the release is made from the solved notebook, so it cannot be judged before
        return [solved]
    release.parent.mkdir(parents=True, exist_ok=True)
    return ([solved] if drifted else []) + (
        [release] if _update(release, release_notebook(lab, root), check_only) else []
    )


def _update(path: Path, text: str, check_only: bool) -> bool:
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return False
    if not check_only:
        path.write_text(text, encoding="utf-8")
    return True
