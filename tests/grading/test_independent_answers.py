"""A slip, a hang or a blank in one answer costs that answer alone: no solution calls what another question builds."""

import pytest

from grading import build
from labkit.cells import needed, read_cells


@pytest.mark.parametrize("lab", build.labs())
def test_no_solution_calls_another_answer(lab):
    cells = read_cells(build.ROOT / "solutions" / lab / f"{lab}.ipynb")
    answers = {cell.id for cell in cells if cell.is_solution}
    for answer in sorted(answers):
        others = answers & {cell.id for cell in needed(cells, [answer])} - {answer}
        assert not others, (
            f"{answer} uses {', '.join(sorted(others))}: give it a correct version (labkit.quantlab.given)"
        )
