"""What students do wrong: one edit of a perfect notebook each, and what must come of it. `cheats.py` has the rest.

The rows follow the failure modes measured with nbgrader's defaults, where most of them lose points that were earned,
give points that were not, or stop the whole class.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from nbformat import NotebookNode
from toy import answer, at, copy_of, insert

FULL = {
    "ceil_div_check": 2.0, "ceil_div_hidden": 3.0, "total_check": 1.0, "total_hidden": 1.0, "softmax_check": 1.0,
    "softmax_hidden": 2.0,
}  # fmt: skip


@dataclass(frozen=True)
class Scenario:
    """edit: what the student did. lost: cells that do not earn full points, with what they earn. note: in the CSV."""

    edit: Callable[[NotebookNode], None]
    lost: dict[str, float] = field(default_factory=dict)
    note: str = ""
    status: str = "graded"
    files: dict[str, str] = field(default_factory=dict)
    slow: bool = False

    @property
    def scores(self) -> dict[str, float]:
        return FULL | self.lost


def none_of(*questions: str) -> dict[str, float]:
    """No points for these questions."""
    return {name: 0.0 for name in FULL if name.rpartition("_")[0] in questions}


SCENARIOS: dict[str, Scenario] = {}


def scenario(**expected):
    """Decorator: the function is the edit, and its name the student's."""

    def add(edit: Callable[[NotebookNode], None]) -> Callable[[NotebookNode], None]:
        SCENARIOS[edit.__name__] = Scenario(edit, **expected)
        return edit

    return add


# Honest work, and what happens to it.


@scenario()
def perfect(nb):
    pass


@scenario()
def a_right_answer_that_warns_and_logs(nb):
    answer(
        nb, "total", "def total(x):\n    import warnings\n    warnings.warn('deprecated')\n    return float(x.sum())"
    )
    insert(nb, "import sys\nprint('INFO engine started', file=sys.stderr)", after="total")


@scenario(lost=none_of("softmax"))
def a_syntax_error(nb):
    answer(nb, "softmax", "def softmax(x)\n    return x")


@scenario(lost=none_of("total"), slow=True)
def an_answer_that_exits(nb):
    answer(nb, "total", "def total(x):\n    raise SystemExit(0)")


@scenario(lost=none_of("total"), slow=True)
def an_answer_that_asks_for_input(nb):
    answer(nb, "total", "def total(x):\n    return float(input('sum?'))")


@scenario(lost=none_of("softmax"))
def an_answer_that_wants_24_gb(nb):
    answer(nb, "softmax", "def softmax(x):\n    return np.ones(3 * 10**9)")


@scenario(lost={"ceil_div_check": 1.0, "ceil_div_hidden": 1.0}, slow=True)
def a_half_right_answer(nb):
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return n // size")


@scenario(lost={"ceil_div_hidden": 2.0})
def an_answer_that_fails_one_hidden_check(nb):
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return -(-n // size) if n < 10**6 else 0")


# Hangs and crashes.


@scenario(lost=none_of("ceil_div"), note="hung in ceil_div_check")
def an_endless_loop_in_an_answer(nb):
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    while True: pass")
    nb.cells[at(nb, "ceil_div_check")].metadata["timeout"] = 100_000


@scenario(note="hung in cell")
def an_endless_loop_in_a_scratch_cell(nb):
    insert(nb, "while True: pass", after="ceil_div")


@scenario(lost=none_of("total"), note="hung in total")
def a_loop_that_ignores_interrupts(nb):
    answer(nb, "total", "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass")


@scenario(lost=none_of("total"), note="crashed in total_check: the kernel died")
def an_answer_that_crashes_the_kernel(nb):
    answer(nb, "total", "def total(x):\n    return np.lib.stride_tricks.as_strided(x, (10**12,)).sum()")


@scenario(note="crashed in cell")
def a_scratch_cell_that_kills_the_kernel(nb):
    insert(nb, "import os\nos._exit(1)", after="softmax")


@scenario(lost=none_of("softmax"), note="crashed in cell")
def a_crash_in_a_helper_cell_that_an_answer_needs(nb):
    insert(nb, "import ctypes\nshift = 0.0\nctypes.string_at(0)", after="ceil_div")
    answer(nb, "softmax", "def softmax(x):\n    e = np.exp(x - shift)\n    return e / e.sum(-1, keepdims=True)")


@scenario(note="hung in cell")
def an_endless_print(nb):
    insert(nb, "i = 0\nwhile True:\n    i += 1\n    print('flood' * 20, i)", after="total")


@scenario()
def a_line_of_100_mb_and_thousands_of_displays(nb):
    insert(nb, "print('x' * 100_000_000)")
    insert(nb, "from IPython.display import display\nfor i in range(5_000): display(i)", after="total")


# Accidents with cells.


@scenario(note="ceil_div_check: the cell was missing and was put back", slow=True)
def a_deleted_check_cell(nb):
    del nb.cells[at(nb, "ceil_div_check")]


@scenario(lost=none_of("total"), note="total: the cell was missing and was put back")
def a_deleted_answer(nb):
    del nb.cells[at(nb, "total")]


@scenario(lost=none_of("ceil_div"))
def everything_of_the_first_question_deleted(nb):
    for name in ("ceil_div", "ceil_div_check", "ceil_div_hidden"):
        del nb.cells[at(nb, name)]


@scenario(note="copies", slow=True)
def a_copied_check_cell(nb):
    nb.cells.insert(at(nb, "total_check") + 1, copy_of(nb, "total_check", "dup00001"))


@scenario(note="copies", slow=True)
def a_copied_answer(nb):
    twin = copy_of(nb, "total", "dup00002")
    twin.source = "x = 1"
    nb.cells.insert(at(nb, "total") + 1, twin)


@scenario(note="copies")
def a_split_answer(nb):
    twin = copy_of(nb, "softmax", "dup00003")
    nb.cells[at(nb, "softmax")].source = "# my helper goes here"
    nb.cells.insert(at(nb, "softmax") + 1, twin)


@scenario(note="its metadata was restored", slow=True)
def a_changed_grade_id(nb):
    nb.cells[at(nb, "softmax_check")].metadata.nbgrader.grade_id = "mine"


@scenario(slow=True)
def changed_cell_ids(nb):
    for n, cell in enumerate(nb.cells):
        cell.id = f"zz{n}"


@scenario(note="its metadata was restored", slow=True)
def stripped_metadata(nb):
    for cell in nb.cells:
        cell.metadata.pop("nbgrader", None)


@scenario(note="its metadata was restored")
def stripped_metadata_and_changed_ids(nb):
    stripped_metadata(nb)
    changed_cell_ids(nb)


@scenario(slow=True)
def a_check_cell_turned_into_markdown(nb):
    cell = nb.cells[at(nb, "total_check")]
    cell.cell_type = "markdown"
    for key in ("outputs", "execution_count"):
        del cell[key]


@scenario(slow=True)
def an_unknown_kernel_name(nb):
    nb.metadata["kernelspec"] = {"name": "nonexistent", "display_name": "x", "language": "python"}


@scenario()
def outputs_and_magics_left_in(nb):
    nb.cells[at(nb, "ceil_div_check")].outputs = [{"output_type": "stream", "name": "stderr", "text": "old"}]
    insert(nb, "%matplotlib inline\n!ls /\nradius = 3")
    insert(nb, "%%time\nsquare = 4", after="total")


@scenario()
def scratch_variables_named_like_built_ins(nb):
    insert(nb, "id = 7\nstr = 'a note'\nprint(id, str)", after="ceil_div")


@scenario()
def an_answer_cell_with_a_variable_named_type(nb):
    answer(nb, "ceil_div", "type = 'fp16'\nlist = [1]\ndef ceil_div(n, size):\n    return -(-n // size)")


@scenario()
def scratch_cells_as_deep_as_they_are_long(nb):
    insert(nb, "n = " + " + ".join(["1"] * 1500))
    insert(nb, "if n < 0: x = 0\n" + "\n".join(f"elif n == {i}: x = {i}" for i in range(1200)))


@scenario()
def displays_and_messages_that_are_not_valid(nb):
    insert(nb, "from IPython.display import display\ndisplay({'text/plain': 5}, raw=True)")
    insert(nb, "display({'text/plain': 'x'}, metadata=5, raw=True)")
    insert(
        nb,
        """
        kernel = get_ipython().kernel
        for kind, content in [("stream", {"name": "stdout", "text": 7}), ("stream", {}), ("display_data", 3),
                              ("error", {"evalue": 1, "traceback": 2}), ("status", {}), ("clear_output", {})]:
            kernel.session.send(kernel.iopub_socket, kind, content, parent=kernel.get_parent())
        """,
    )


@scenario(note="setup: it was edited")
def an_import_among_those_of_the_setup_cell(nb):
    nb.cells[at(nb, "setup")].source += "\nimport fractions"
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return int(fractions.Fraction(n + size - 1) // size)")


@scenario()
def answers_in_numpys_numbers(nb):
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return np.int64(-(-n // size))")
    answer(nb, "total", "def total(x):\n    return np.float32(x.sum())")


@scenario()
def a_table_that_another_cell_fills(nb):
    insert(nb, "for n in range(0, 1_000_100):\n    if n % 16 in (0, 1): ceilings.update({n: -(-n // 16)})")
    insert(nb, "ceilings = {}")
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return ceilings[n] if size == 16 else -(-n // size)")


@scenario(note="hung in total")
def an_answer_cell_that_goes_on_for_ever_after_the_answer(nb):
    """The kernel of the hidden checks runs it again, for as long as the answer takes."""
    answer(nb, "total", "def total(x):\n    return float(x.sum())\nwhile True: pass")


@scenario()
def a_helper_cell_with_top_level_await(nb):
    insert(nb, "import asyncio\nawait asyncio.sleep(0)\nzero = 0.0")
    answer(nb, "total", "def total(x):\n    return float(x.sum()) + zero")
