"""The drivers of hidden checks: they run among a student's names, which may be anything."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path

import pytest

from grading import build
from labkit.cells import names, read_cells


def drivers(path: Path) -> list[ast.FunctionDef]:
    """Functions whose source is sent to the student's process, without their annotations, which nobody evaluates."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    calls = [n for n in ast.walk(tree) if isinstance(n, ast.Call) and ast.unparse(n.func) == "remote.call"]
    sent = {call.args[0].id for call in calls if isinstance(call.args[0], ast.Name)}
    found = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name in sent]
    for node in (n for driver in found for n in ast.walk(driver)):
        if isinstance(node, ast.FunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
    return found


@pytest.mark.parametrize("lab", build.labs())
def test_a_driver_uses_no_name_of_the_notebook_but_the_answers(lab):
    cells = read_cells(build.ROOT / "labs" / lab / f"{lab}.ipynb")
    answers = {name for cell in cells if cell.is_solution for name in names(cell.source)[0]}
    own = {"labkit", *vars(builtins), *answers}
    found = [d for path in sorted((build.ROOT / "grading" / "hidden" / lab).glob("*.py")) for d in drivers(path)]
    assert found, f"no driver of {lab} was found: has the way of sending them changed?"
    for driver in found:
        defined, used = names(ast.unparse(driver))
        others = used - defined - own
        assert not others, (
            f"{driver.name} uses {', '.join(sorted(others))} of the notebook, where a student may have given the name"
            " to something else: import it in the driver"
        )


@pytest.mark.parametrize("lab", build.labs())
def test_a_driver_imports_no_checks_of_the_lab(lab):
    """The process that a hidden check talks to is started without them."""
    for path in sorted((build.ROOT / "grading" / "hidden" / lab).glob("*.py")):
        for driver in drivers(path):
            for node in (n for n in ast.walk(driver) if isinstance(n, ast.ImportFrom)):
                assert not (node.module or "").startswith("labkit.checks.lab"), (
                    f"{driver.name} imports {node.module}, which is not there in grading: move what it needs out of it"
                )
