"""labkit.cells: which cells a check needs, how they run without Jupyter, and what a forked process may cost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from labkit.cells import Cell, dependents, forked, names, needed, plain_python, read_cells, run_cells
from tests.serve.processes import left_over


def cells(*sources: str, **graded: float) -> list[Cell]:
    """Cells c0, c1, ...; `c3=2.0` makes that one graded."""
    return [Cell(f"c{n}", source, graded.get(f"c{n}")) for n, source in enumerate(sources)]


def ids(found: list[Cell]) -> list[str]:
    return [c.id for c in found]


def notebook(path: Path, *raw: dict) -> Path:
    path.write_text(json.dumps({"cells": list(raw), "metadata": {}, "nbformat": 4, "nbformat_minor": 5}))
    return path


def code(source: str | list[str], **nbgrader) -> dict:
    meta = {"nbgrader": nbgrader} if nbgrader else {}
    return {"cell_type": "code", "metadata": meta, "source": source, "outputs": [], "execution_count": None}


# reading


def test_code_cells_are_read_with_their_grade_ids_points_and_locks(tmp_path):
    raw = [
        {"cell_type": "markdown", "metadata": {}, "source": "# Title"},
        code(["import math\n", "x = 1"]),
        code("def q(): ...", grade_id="q", solution=True, grade=False, locked=False),
        code("1", grade_id="q_check", grade=True, points=2, locked=True),
    ]
    first, answer, check = read_cells(notebook(tmp_path / "n.ipynb", *raw))
    assert first == Cell("cell0", "import math\nx = 1")
    assert answer == Cell("q", "def q(): ...", None, True, False)
    assert check == Cell("q_check", "1", 2.0, False, True) and check.question == "q"


@pytest.mark.parametrize(
    "text",
    ['{"cells": [', "[]", "{}", '{"worksheets": []}', '{"cells": [{"cell_type": "code"}]}', "[" * 100_000, "\x00\xff"],
)
def test_a_file_that_is_no_notebook_is_one_sentence(tmp_path, text):
    path = tmp_path / "broken.ipynb"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=r"broken\.ipynb is not a readable notebook: \w+"):
        read_cells(path)


@pytest.mark.parametrize("points", [None, "many", [1]])
def test_points_that_are_no_number_make_the_notebook_unreadable(tmp_path, points):
    path = notebook(tmp_path / "n.ipynb", code("1", grade_id="q_check", grade=True, points=points))
    with pytest.raises(ValueError, match=r"n\.ipynb is not a readable notebook"):
        read_cells(path)


# what a check needs


def test_a_cell_is_needed_if_it_defines_what_a_needed_cell_uses():
    nb = cells("import math", "slow_demonstration()", "def area(r): return math.pi * r * r", "area(2)")
    assert ids(needed(nb, ["c3"])) == ["c0", "c2", "c3"]


def test_a_helper_defined_after_the_function_that_uses_it_is_needed():
    nb = cells("def outer(): return helper()", "def helper(): return 1", "outer()")
    assert ids(needed(nb, ["c2"])) == ["c0", "c1", "c2"]


def test_a_cell_after_the_last_target_is_never_needed():
    nb = cells("def f(): return g()", "f", "def g(): return 1")
    assert ids(needed(nb, ["c1"])) == ["c0", "c1"]


@pytest.mark.parametrize(
    "change",
    ["Pool.free = lambda self: 1", "table['a'] = 1; Pool = Pool", "Pool.x.y = 2", "Pool += 1", "from m import *"],
)
def test_a_cell_that_changes_a_used_name_in_place_is_needed(change):
    nb = cells("class Pool: ...", change, "Pool()")
    assert ids(needed(nb, ["c2"])) == ["c0", "c1", "c2"]


def test_the_cell_before_an_augmented_assignment_is_needed():
    nb = cells("total = 0", "total += 1", "total")
    assert ids(needed(nb, ["c2"])) == ["c0", "c1", "c2"]


def test_a_redefined_builtin_is_needed_like_any_other_name():
    nb = cells("def hash(x): return 7", "hash(1)")
    assert ids(needed(nb, ["c1"])) == ["c0", "c1"]


def test_a_name_that_a_function_declares_global_is_defined_by_its_cell():
    nb = cells("def setup():\n    global state\n    state = 1", "state")
    assert ids(needed(nb, ["c1"])) == ["c0", "c1"]


def test_local_names_of_a_function_make_no_dependency():
    defined, used = names("def f(x):\n    y = x + z\n    return y")
    assert defined == {"f"} and used == {"z"}


def test_a_cell_with_magics_still_defines_its_names():
    assert names("%matplotlib inline\nx = 1")[0] == {"x"}


def test_an_unknown_target_is_named():
    with pytest.raises(KeyError, match="no cell with id nope"):
        needed(cells("1"), ["nope"])


def test_dependents_are_the_questions_whose_checks_reach_the_changed_cell():
    nb = [
        Cell("a", "def a(): ...", is_solution=True),
        Cell("a_check", "a()", 1.0),
        Cell("b", "def b(): return a()", is_solution=True),
        Cell("b_check", "b()", 1.0),
        Cell("c", "def c(): ...", is_solution=True),
        Cell("c_check", "c()", 1.0),
    ]
    assert dependents(nb, "a") == {"a", "b"}
    assert dependents(nb, "c") == {"c"}


LONG_SUM = "n = " + " + ".join(["m"] * 1500)
MANY_ELIFS = "if m < 0: n = 0\n" + "\n".join(f"elif m == {i}: n = {i}" for i in range(1200))


@pytest.mark.parametrize("source", [LONG_SUM, MANY_ELIFS], ids=["sum", "elif"])
def test_a_deeply_nested_cell_defines_and_uses_what_it_does(source):
    assert names(source) == ({"n"}, {"m"})


def test_a_cell_that_awaits_defines_its_names():
    assert "x" in names("import asyncio\nx = await asyncio.sleep(0)")[0]


# running


def test_a_broken_cell_of_many_blank_lines_is_read_at_once():
    source = "this is no python" + "\n" * 50_000 + " " * 50_000 + "x"
    start = time.monotonic()
    assert plain_python(source) == source
    assert time.monotonic() - start < 2, "a pattern of cells.py takes time that grows with the square"


def test_a_cell_may_await_at_its_top_level():
    outcomes = run_cells(cells("import asyncio\nx = await asyncio.sleep(0, 2)", "await asyncio.sleep(0, x + 1)"))
    assert [o.value for o in outcomes.values()] == [None, 3.0], outcomes


@pytest.mark.parametrize(
    ("source", "plain"),
    [
        ("x = 1", "x = 1"),
        ("%matplotlib inline\nx = 1", "pass\nx = 1"),
        ("if True:\n    !ls", "if True:\n    pass"),
        ("files = !ls\nx = 1", "files = None\nx = 1"),
        ("torch.dot?\nx = 1", "pass\nx = 1"),
        ("%%time\nx = 1", "x = 1"),
        ("%%bash\nls", ""),
        ('text = """\n% of all\n"""', 'text = """\n% of all\n"""'),
        ("x = (", "x = ("),
    ],
)
def test_magics_are_taken_out_of_a_cell(source, plain):
    assert plain_python(source) == plain


def test_the_value_of_the_last_expression_is_the_cells_outcome():
    outcomes = run_cells(cells("x = 2", "print('hello')\nx + 0.5", "True", "'text'", "x = 3"))
    assert [o.value for o in outcomes.values()] == [None, 2.5, None, None, None]
    assert outcomes["c1"].text == "hello\n"


@pytest.mark.parametrize("source", ["1 / 0", "def f(:", "raise SystemExit(3)", "import sys; sys.exit('bye')"])
def test_a_failing_cell_costs_itself_alone(source):
    outcomes = run_cells(cells("x = 1", source, "x"))
    assert outcomes["c1"].error and outcomes["c1"].value is None
    assert outcomes["c2"].value == 1.0


def test_annotations_mean_in_a_cell_what_they_mean_in_jupyter():
    outcomes = run_cells(cells("def f(x: unknown_type): ..."))
    assert "NameError" in outcomes["c0"].error, "the cell was compiled with cells.py's own `from __future__` lines"


def test_an_endless_print_does_not_fill_the_memory():
    outcomes = run_cells(cells("for _ in range(20_000): print('x' * 1000)"))
    assert len(outcomes["c0"].text) < 200_000 and "output cut here" in outcomes["c0"].text


def test_display_is_at_hand_as_in_a_notebook():
    assert run_cells(cells("display(1)\n2"))["c0"].value == 2.0


def test_running_cells_leaves_the_main_module_in_place():
    before = sys.modules["__main__"]
    run_cells(cells("x = 1"))
    assert sys.modules["__main__"] is before


def test_a_function_of_a_cell_has_a_source_that_can_be_read():
    source = "import inspect\ndef f():\n    return 1\nlen(inspect.getsource(f))"
    assert run_cells(cells(source))["c0"].value == len("def f():\n    return 1\n")


# the forked process


def test_a_forked_process_gives_its_result_and_keeps_its_changes_to_itself():
    state = [1]
    assert forked(lambda: state.append(2) or len(state), 30) == 2
    assert state == [1]


def test_a_crash_says_how_the_process_died():
    with pytest.raises(RuntimeError, match="SIGKILL"):
        forked(lambda: os.kill(os.getpid(), signal.SIGKILL), 30)
    with pytest.raises(RuntimeError, match="exit code 3"):
        forked(lambda: os._exit(3), 30)


def test_a_hang_ends_at_the_timeout():
    start = time.monotonic()
    with pytest.raises(TimeoutError, match="no result after 0 s"):
        forked(lambda: time.sleep(60), 0.3)
    assert time.monotonic() - start < 10


def test_what_a_forked_process_started_ends_with_it(tmp_path):
    pid_file = tmp_path / "pid"

    def work() -> None:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(300)"])
        pid_file.write_text(str(child.pid))
        time.sleep(300)

    with pytest.raises(TimeoutError):
        forked(work, 2)
    pid = int(pid_file.read_text())
    assert not left_over([pid], [], within=30), f"process {pid} is still there"


def test_a_forked_process_reads_nothing_and_prints_nowhere(capfd):
    def work() -> str:
        os.write(1, b"to the terminal")
        os.write(2, b"to the terminal")
        try:
            return input()
        except EOFError:
            return "no input"

    assert forked(work, 30) == "no input"
    assert capfd.readouterr() == ("", "")
