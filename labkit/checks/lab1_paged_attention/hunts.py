"""The bug hunt: a static block table that goes stale, and one that is too narrow."""

from __future__ import annotations

import math

import torch

from labkit.checks.contract import Question, require

LAB = "lab1_paged_attention"

block_table_test = Question("block_table_test", LAB, "your test passes a sound table and fails every faulty one")
static_block_table = Question("static_block_table", LAB, "the table is wide enough, never stale, and stays where it is")


class Sound:
    """Right, and written so that it is of no use as an answer: one element at a time, no refusal of long rows."""

    def __init__(self, max_seqs: int, max_model_len: int, block_size: int):
        self.table = torch.zeros(max_seqs, self.width(max_model_len, block_size), dtype=torch.int32)

    @staticmethod
    def width(max_model_len: int, block_size: int) -> int:
        return math.ceil(max_model_len / block_size)

    def rows(self, block_tables: list[list[int]]) -> int:
        return self.table.shape[0]

    def refill(self, block_tables: list[list[int]]) -> None:
        for row in range(self.rows(block_tables)):
            blocks = block_tables[row] if row < len(block_tables) else []
            for column in range(self.table.shape[1]):
                self.table[row, column] = blocks[column] if column < len(blocks) else 0


class Narrow(Sound):
    """One column too few for a sequence of max_model_len tokens."""

    @staticmethod
    def width(max_model_len: int, block_size: int) -> int:
        return max_model_len // block_size


class StaleRows(Sound):
    """Rows past the batch keep what stood there."""

    def rows(self, block_tables: list[list[int]]) -> int:
        return len(block_tables)


class StaleTails(Sound):
    """A row keeps the tail of the longer sequence that had it before."""

    def refill(self, block_tables: list[list[int]]) -> None:
        for row, blocks in enumerate(block_tables):
            for column, block in enumerate(blocks):
                self.table[row, column] = block
        self.table[len(block_tables) :] = 0


class AppendsOnly(Sound):
    """Writes only what was added since the last step, so a row's new sequence keeps the old one's beginning."""

    def __init__(self, *sizes: int):
        super().__init__(*sizes)
        self.filled: dict[int, int] = {}

    def refill(self, block_tables: list[list[int]]) -> None:
        for row, blocks in enumerate(block_tables):
            for column in range(self.filled.get(row, 0), len(blocks)):
                self.table[row, column] = blocks[column]
            self.filled[row] = max(self.filled.get(row, 0), len(blocks))


class Moves(Sound):
    """A new tensor at every step, whose address no captured graph knows."""

    def refill(self, block_tables: list[list[int]]) -> None:
        self.table = self.table.clone()
        super().refill(block_tables)


def _passes_sound(answer) -> None:
    try:
        answer(Sound)
    except AssertionError as error:
        require(False, f"your test rejects a sound table: {error or 'an assertion failed'}")


for _table_class in (Sound, Narrow, StaleRows, StaleTails, AppendsOnly, Moves):
    _table_class.__name__ = _table_class.__qualname__ = "Table"  # a test is to look at what a table does


@block_table_test.invariant("a sound table passes", share=0, stops=True)
def _(answer) -> None:
    _passes_sound(answer)


FAULTS = {
    "is too narrow for max_model_len": Narrow,
    "keeps the rows of sequences that left": StaleRows,
    "keeps the tail of a longer sequence": StaleTails,
    "keeps the beginning of another sequence": AppendsOnly,
    "moves to a new tensor at each step": Moves,
}


def _catches(fault: str, table_class: type) -> None:
    @block_table_test.invariant(f"a table that {fault} fails")
    def _(answer) -> None:
        try:
            answer(table_class)
        except (AssertionError, RuntimeError, IndexError, ValueError):
            return
        require(False, f"your test accepts a table that {fault}")


for _fault, _class in FAULTS.items():
    _catches(_fault, _class)


def _table(answer, *sizes: int):
    made = answer(*sizes)
    require(isinstance(made.table, torch.Tensor), f".table is {type(made.table).__name__}, a tensor was expected")
    require(made.table.dtype == torch.int32, f".table has dtype {made.table.dtype}, int32 was expected")
    return made


def _holds(made, block_tables: list[list[int]], look_at: str) -> None:
    made.refill(block_tables)
    rows, width = made.table.shape
    want = [b + [0] * (width - len(b)) for b in block_tables] + [[0] * width] * (rows - len(block_tables))
    got = made.table.tolist()
    require(got == want, f"{look_at}: after refill({block_tables}) the table is {got}, {want} expected")


@static_block_table.invariant("a sequence of max_model_len tokens fits")
def _(answer) -> None:
    made = _table(answer, 2, 10, 4)
    require(
        made.table.shape[1] >= 3,
        f"10 tokens in blocks of 4 need 3 columns, the table has {made.table.shape[1]}: too narrow",
    )
    _holds(made, [[5, 6, 7]], "the longest sequence")


@static_block_table.invariant("nothing of a row's last user stays", share=2)
def _(answer) -> None:
    made = _table(answer, 3, 16, 4)
    for step in ([[5, 6, 7], [8]], [[9], [8, 4]], [[1, 2, 3, 4]], [[2], [3], [4, 5]], []):
        _holds(made, step, "the table is stale: rows shrink, change places and empty between steps")


@static_block_table.invariant("the tensor stays where it is")
def _(answer) -> None:
    made = _table(answer, 2, 8, 4)
    before = made.table.data_ptr()
    _holds(made, [[1, 2], [3]], "one step")
    require(made.table.data_ptr() == before, "the table moved to another address, which no captured graph reads")


@static_block_table.invariant("a sequence that is too long is refused by its row, and nothing changes")
def _(answer) -> None:
    made = _table(answer, 2, 8, 4)
    width = made.table.shape[1]
    _holds(made, [[1, 2], [3]], "one step")
    before = made.table.tolist()
    try:
        made.refill([[9], list(range(width + 1))])
    except ValueError as error:
        require("1" in str(error), f"the ValueError does not name row 1: {error}")
        require(made.table.tolist() == before, "the refused refill changed the table")
        return
    require(False, f"row 1 has {width + 1} blocks where {width} fit, and nothing was raised")


QUESTIONS = [block_table_test, static_block_table]
