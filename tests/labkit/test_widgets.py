"""The pool widget without a browser: the slider moves the picture, and a broken allocator has one too."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from labkit import widgets
from labkit.block_pool import BlockPool
from labkit.cells import read_cells

ROOT = Path(__file__).resolve().parents[2]


def parts(box):
    controls, picture, numbers = box.children
    return controls.children[1], picture, numbers


@pytest.fixture(scope="module")
def trace():
    return widgets.pool_trace(BlockPool)


def test_the_picture_follows_the_slider_back_and_forth(trace):
    slider, picture, numbers = parts(widgets.pool_stepper(trace))
    first = bytes(picture.value)
    slider.value = trace.first_preemption + 1
    assert picture.value != first, "the picture did not change with the slider"
    assert "is preempted" in numbers.value
    slider.value = 0
    assert picture.value == first


def test_an_allocator_that_is_not_written_yet_is_replaced_and_that_is_said():
    class Stub:
        def __init__(self, num_blocks):
            raise NotImplementedError

    trace = widgets.pool_trace(Stub)
    assert trace.note == "your allocator is not written yet: this is the course's own"
    assert trace.preemptions


def test_an_allocator_that_fails_half_way_is_replaced():
    class Broken(BlockPool):
        def free(self, block):
            raise KeyError(block)

    assert "raised KeyError" in widgets.pool_trace(Broken).note


def test_where_the_shipped_pool_is_hidden_the_picture_is_empty(monkeypatch):
    monkeypatch.setitem(sys.modules, "labkit.block_pool", None)
    trace = widgets.pool_trace(object)
    assert trace.note.startswith("no picture")
    parts(widgets.pool_stepper(trace))


def test_the_module_imports_without_any_jupyter_package():
    code = "import sys; sys.modules['ipywidgets'] = None; sys.modules['IPython'] = None; import labkit.widgets"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("notebook", sorted((ROOT / "labs").glob("lab*/*.ipynb")), ids=lambda path: path.stem)
def test_a_widget_is_the_last_expression_of_its_cell_or_it_is_never_seen(notebook):
    shown = hidden = 0
    for cell in read_cells(notebook):
        tree = ast.parse(cell.source)
        for node in ast.walk(tree):
            if isinstance(node, ast.Expr) and re.match(r"\w*widgets?\.\w+\(", ast.unparse(node)):
                shown, hidden = shown + (node is tree.body[-1]), hidden + (node is not tree.body[-1])
    assert shown and not hidden, "Jupyter shows the value of a cell's last line alone, and of none inside a try"
