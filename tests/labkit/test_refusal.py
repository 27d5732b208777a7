"""What an answer reaches through the student's own cells counts as if the answer said it."""

import pytest

from labkit.cells import Cell
from labkit.labcheck import refusal

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
