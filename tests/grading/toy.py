"""A course with one small lab of its own, so that these tests cost seconds and no camp lab's size matters to them."""

from __future__ import annotations

import copy
import json
import textwrap
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell

from grading import build
from grading.course import Course

LAB = "lab90_toy"
CELL_SECONDS = 4

SOURCE = '''
# %% [markdown]
# # A toy lab

# %% readonly="setup"
import labkit
import numpy as np

# %% question="ceil_div" points=2 hidden=3 timeout=SECONDS
def ceil_div(n: int, size: int) -> int:
    """How many blocks of `size` hold n tokens."""
    ### BEGIN SOLUTION
    return -(-n // size)
    ### END SOLUTION

# %% question="total" points=1 hidden=1 timeout=SECONDS
def total(x: np.ndarray) -> float:
    """Sum of all values."""
    ### BEGIN SOLUTION
    return float(x.sum())
    ### END SOLUTION

# %% question="softmax" points=1 hidden=2 timeout=SECONDS
def softmax(x: np.ndarray) -> np.ndarray:
    """Softmax over the last axis."""
    ### BEGIN SOLUTION
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
    ### END SOLUTION
'''

CHECKS = '''
"""Public checks of the toy lab."""
import numpy as np
from labkit.checks.contract import Question, require

LAB = "lab90_toy"
ceil_div = Question("ceil_div", LAB, "blocks are rounded up", shipped=("kernels.toy_answer",))
total = Question("total", LAB, "all values are summed", refused=("math.fsum",))
softmax = Question("softmax", LAB, "rows sum to one", shipped=("kernels.toy_answer",))

@ceil_div.invariant("a full block is one block")
def _(answer):
    require(answer(16, 16) == 1, "16 tokens fill one block of 16")

@ceil_div.invariant("a started block counts")
def _(answer):
    require(answer(17, 16) == 2, "17 tokens need two blocks of 16")

@total.invariant("the sum is right")
def _(answer):
    x = np.arange(5.0)
    require(answer(x) == 10.0, "0 + 1 + 2 + 3 + 4 is 10")

def rounded_up(n, size):
    """What the answer is compared with here, for anybody who gets at it."""
    return -(-n // size)

@softmax.invariant("rows sum to one")
def _(answer):
    got = answer(np.ones((2, 4)))
    require(np.allclose(got.sum(-1), 1), "a row does not sum to one")

QUESTIONS = [ceil_div, total, softmax]
'''

HIDDEN = """
import math
import numpy as np
from grading.blackbox import hidden_check, require

LAB = "lab90_toy"
SECRET_OF_THE_HIDDEN_CHECK = 12345

@hidden_check(LAB, "ceil_div")
def small(remote):
    for n in (0, 1, 15, 199):
        got = remote.call("ceil_div", n, 3)
        require(type(got) is int and got == math.ceil(n / 3), f"wrong for {n} tokens: the hidden message")

@hidden_check(LAB, "ceil_div")
def large(remote):
    require(remote.call("ceil_div", 10**6 + 1, 16) == 62501, "wrong for a million tokens: the hidden message")

@hidden_check(LAB, "ceil_div")
def exact(remote):
    require(remote.call("ceil_div", 64, 16) == 4, "wrong for full blocks: the hidden message")

@hidden_check(LAB, "total")
def matrix(remote):
    require(remote.call("total", np.ones((3, 7))) == 21.0, "wrong for a matrix: the hidden message")

@hidden_check(LAB, "softmax")
def values(remote):
    got = remote.call("softmax", np.array([[0.0, np.log(3.0)]]))
    require(isinstance(got, np.ndarray) and np.allclose(got, [[0.25, 0.75]]), "wrong values: the hidden message")
"""

SHIPPED = """
import numpy as np
def ceil_div(n, size):
    return -(-n // size)
def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)
"""


def make_course(root: Path) -> Course:
    """Write the toy course's files, build its notebooks, and make its questions known in this process."""
    files = {
        f"solutions/{LAB}/{LAB}.nb.py": SOURCE.replace("SECONDS", str(CELL_SECONDS)),
        f"labkit/checks/{LAB}/__init__.py": CHECKS,
        f"grading/hidden/{LAB}.py": HIDDEN,
        "kernels/toy_answer.py": SHIPPED,
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    course = Course(root).activate()
    build.build(LAB, root=root)
    return course


def solved(course: Course) -> NotebookNode:
    """The released notebook with the solution's cells in it: a perfect submission."""
    notebook = nbformat.read(course.release(LAB), 4)
    answers = nbformat.read(course.root / "solutions" / LAB / f"{LAB}.ipynb", 4)
    sources = {
        c.metadata.nbgrader.grade_id: c.source for c in answers.cells if c.metadata.get("nbgrader", {}).get("solution")
    }
    for cell in notebook.cells:
        cell.source = sources.get(cell.metadata.get("nbgrader", {}).get("grade_id"), cell.source)
    return notebook


def at(notebook: NotebookNode, grade_id: str) -> int:
    """Position of a cell."""
    return next(n for n, c in enumerate(notebook.cells) if c.metadata.get("nbgrader", {}).get("grade_id") == grade_id)


def answer(notebook: NotebookNode, grade_id: str, source: str) -> None:
    """Replace a cell's source."""
    notebook.cells[at(notebook, grade_id)].source = textwrap.dedent(source).strip("\n")


def insert(notebook: NotebookNode, source: str, after: str = "setup") -> None:
    """Insert a cell of the student's own behind a cell."""
    notebook.cells.insert(at(notebook, after) + 1, new_code_cell(textwrap.dedent(source).strip("\n")))


def copy_of(notebook: NotebookNode, grade_id: str, new_id: str) -> NotebookNode:
    """A cell as JupyterLab's copy makes it: the same metadata under a new cell id."""
    twin = copy.deepcopy(notebook.cells[at(notebook, grade_id)])
    twin.id = new_id
    return twin


def hand_in(folder: Path, student: str, notebook: NotebookNode | str, name: str = f"{LAB}.ipynb") -> Path:
    """Put a notebook, or a text instead of one, where nbgrader's layout wants it."""
    place = folder / student / LAB
    place.mkdir(parents=True, exist_ok=True)
    text = notebook if isinstance(notebook, str) else json.dumps(notebook)
    (place / name).write_text(text)
    return place
