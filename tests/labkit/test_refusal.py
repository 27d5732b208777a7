"""What an answer reaches through the student's own cells counts as if the answer said it."""

import pytest

from grading import build
from labkit.cells import Cell, read_cells
from labkit.labcheck import graded_questions, refusal

ANSWER = "def row_softmax(x):\n    return tools[0](x, -1)\n"
CHECK = 'labkit.score(labkit.check("row_softmax", row_softmax), points=1)'


def cells(*scratch):
    yield Cell("setup", "import torch\nimport labkit\n", is_locked=True)
    yield from (Cell(f"cell{n}", source) for n, source in enumerate(scratch))
    yield Cell("row_softmax", ANSWER, is_solution=True)
    yield Cell("row_softmax_check", CHECK, 1.0, is_locked=True)


@pytest.mark.parametrize(
    "scratch",
    [
        ("tools = [torch.softmax]",),
        ("tools = []", "tools.append(torch.softmax)"),
        ("tools = []", "x = 1\ntools.extend([torch.softmax])"),
        ("class T:\n    pass\ntools = [T]", "setattr(tools[0], '__call__', torch.softmax)"),
    ],
)
def test_a_forbidden_name_that_is_put_into_a_helper_is_found(scratch):
    assert "softmax" in refusal(list(cells(*scratch)), "row_softmax")


def test_comparing_ones_own_helper_with_what_is_forbidden_costs_nothing():
    scratch = (
        "def mine(x, d):\n    return x\ntools = [mine]",
        "print(torch.allclose(mine(1, 2), torch.softmax(1, 2)))",
    )
    assert refusal(list(cells(*scratch)), "row_softmax") == ""


HONEST = {
    "a second import": "import labkit",
    "a copy of the setup cell": "SETUP",
    "more of labkit beside what setup imports": "from labkit import device, quantlab, serve, models, meter, plots",
    "a call of the checks": "import labkit\nlabkit.score(labkit.check('x', print))",
    "a look at the shipped answers": "from kernels import reference\nprint(labkit.checks, reference)",
    "the system": "import os, sys, time, math, inspect\nos.environ['X'] = str(time.time())",
}


@pytest.mark.parametrize("scratch", HONEST.values(), ids=HONEST.keys())
@pytest.mark.parametrize("lab", build.labs())
def test_an_honest_scratch_cell_costs_no_question_a_point(lab, scratch):
    solution = read_cells(build.ROOT / "solutions" / lab / f"{lab}.ipynb")
    setup = next(c.source for c in solution if c.id == "setup")
    cells = [*solution[:1], Cell("scratch", setup if scratch == "SETUP" else scratch), *solution[1:]]
    said = {q: refusal(cells, q) for q in graded_questions(solution)}
    refused = {q: why for q, why in said.items() if why}
    assert not refused, f"{scratch!r} in a scratch cell costs {len(refused)} questions all their points: {refused}"
