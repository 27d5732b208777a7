"""Blocks that several own or several want: copy on write, preemption."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.checks.lab1_paged_attention.allocator import LAB, SHIPPED, refuses
from labkit.sequences import OutOfBlocks, Sequence


class Pool:
    """A pool for checks: correct, and it notes every misuse."""

    def __init__(self, num_blocks: int):
        self.refs = [0] * num_blocks

    @property
    def num_free(self) -> int:
        return self.refs.count(0)

    def ref_count(self, block: int) -> int:
        return self.refs[block]

    def allocate(self, count: int) -> list[int]:
        if count > self.num_free:
            raise OutOfBlocks(f"{count} blocks asked for, {self.num_free} free")
        blocks = [b for b, refs in enumerate(self.refs) if refs == 0][:count]
        for block in blocks:
            self.refs[block] = 1
        return blocks

    def free(self, block: int) -> None:
        require(self.refs[block] > 0, f"block {block} is freed and was free already")
        self.refs[block] -= 1


writable_block = Question(
    "writable_block", LAB, "a shared block is copied before it is written, and only then", SHIPPED
)


@writable_block.invariant("a block of one's own is written in place")
def _(answer) -> None:
    pool, copies = Pool(4), []
    table = pool.allocate(2)
    got = answer(table, 1, pool, lambda a, b: copies.append((a, b)))
    require(
        got == 1 and table == [0, 1] and not copies, f"block 1 has one owner, yet {got} was given and copied {copies}"
    )


@writable_block.invariant("a shared block is copied, and the copy takes its place", share=2)
def _(answer) -> None:
    pool, copies = Pool(4), []
    table = pool.allocate(2)
    pool.refs[1] = 2
    got = answer(table, 1, pool, lambda a, b: copies.append((a, b)))
    require(got != 1, "block 1 has two owners and was given for writing: the other one would read what is written")
    require(copies == [(1, got)], f"copies made: {copies}, one from block 1 to block {got} expected")
    require(table == [0, got], f"the table is {table}, [0, {got}] expected")


@writable_block.invariant("the shared block loses one owner, and the copy has one")
def _(answer) -> None:
    pool = Pool(4)
    table = pool.allocate(1)
    pool.refs[0] = 3
    got = answer(table, 0, pool, lambda a, b: None)
    require(pool.refs[0] == 2, f"the shared block had 3 owners and has {pool.refs[0]} now, 2 expected")
    require(pool.refs[got] == 1, f"the copy has {pool.refs[got]} owners, 1 expected")


@writable_block.invariant("when no block is free, nothing has changed")
def _(answer) -> None:
    pool = Pool(1)
    table = pool.allocate(1)
    pool.refs[0] = 2
    refuses(OutOfBlocks, lambda: answer(table, 0, pool, lambda a, b: None), "copying with no free block")
    require(table == [0] and pool.refs == [2], f"after OutOfBlocks the table is {table} and the counts are {pool.refs}")


make_room = Question("make_room", LAB, "the oldest sequences get their blocks and the last arrivals make room", SHIPPED)


def _batch(pool: Pool, lengths: list[int], block_size: int) -> list[Sequence]:
    """Running sequences of these lengths, whose newest token has no room yet if it starts a block."""
    return [Sequence(i, list(range(n)), pool.allocate(-(-(n - 1) // block_size)), n - 1) for i, n in enumerate(lengths)]


@make_room.invariant("with enough blocks everybody goes on")
def _(answer) -> None:
    pool = Pool(10)
    running = _batch(pool, [5, 3, 9], 4)
    waiting: list[Sequence] = []
    answer(running, waiting, pool, 4)
    require([s.id for s in running] == [0, 1, 2] and not waiting, "nobody has to be preempted with 4 free blocks")
    tables = [len(s.block_table) for s in running]
    require(tables == [2, 1, 3], f"tables of {tables} blocks for 5, 3, 9 tokens in blocks of 4, [2, 1, 3] expected")


@make_room.invariant("a sequence gets as many blocks as it lacks, and none more")
def _(answer) -> None:
    pool = Pool(9)
    waiting: list[Sequence] = []
    running = [Sequence(0, list(range(11)), [], 0), Sequence(1, list(range(8)), pool.allocate(2), 7)]
    answer(running, waiting, pool, 4)
    tables = [len(s.block_table) for s in running]
    require(
        tables == [3, 2],
        f"11 tokens without a block and 8 tokens in 2 blocks of 4 got tables of {tables}, [3, 2] expected",
    )


@make_room.invariant("freeing a shared block need not make it free")
def _(answer) -> None:
    pool = Pool(3)
    waiting: list[Sequence] = []
    running = _batch(pool, [5, 5, 5], 4)
    pool.refs[2] = 2  # the last arrival's only block has another owner
    answer(running, waiting, pool, 4)
    ids = ([s.id for s in running], [s.id for s in waiting])
    require(ids == ([0], [1, 2]), f"running and waiting are {ids}: preempting 2 freed nothing, so 1 had to go too")


@make_room.invariant("the last arrival makes room, whatever its size", share=2)
def _(answer) -> None:
    pool = Pool(5)
    running = _batch(pool, [5, 13, 4], 4)
    waiting: list[Sequence] = []
    answer(running, waiting, pool, 4)
    ids = ([s.id for s in running], [s.id for s in waiting])
    require(ids == ([0], [1, 2]), f"running and waiting are {ids}; request 0 needs a block, then request 1 one more")
    require(len(running[0].block_table) == 2, "request 0 did not get its second block")


@make_room.invariant("a preempted sequence gives all its blocks back and keeps its tokens")
def _(answer) -> None:
    pool = Pool(3)
    running = _batch(pool, [5, 8], 4)
    waiting: list[Sequence] = []
    answer(running, waiting, pool, 4)
    require([s.id for s in waiting] == [1], f"waiting is {[s.id for s in waiting]}, [1] expected")
    require(waiting[0].block_table == [], f"the preempted sequence still lists blocks {waiting[0].block_table}")
    require(pool.num_free == 1, f"{pool.num_free} blocks are free, 1 expected: the victim's blocks leaked")
    require(len(waiting[0].tokens) == 8, "the preempted sequence lost tokens: they are its prompt when it comes back")
    require(waiting[0].num_computed == 0, "num_computed is not 0: its K and V are gone and must be recomputed")


@make_room.invariant("preempted sequences wait in front of new ones, oldest first")
def _(answer) -> None:
    pool, waiting = Pool(4), [Sequence(9, [1])]
    running = _batch(pool, [5, 5, 2, 2], 4)
    answer(running, waiting, pool, 4)
    ids = [s.id for s in waiting]
    require(ids == [2, 3, 9], f"waiting is {ids}, [2, 3, 9] expected: requests 3 and then 2 made room for 0 and 1")


@make_room.invariant("a sequence that cannot grow preempts itself, never an older one")
def _(answer) -> None:
    pool = Pool(3)
    running = _batch(pool, [4, 9], 4)
    waiting: list[Sequence] = []
    answer(running, waiting, pool, 4)
    ids = ([s.id for s in running], [s.id for s in waiting])
    require(
        ids == ([0], [1]), f"running and waiting are {ids}: request 1 needs a block, and is itself the last arrival"
    )


QUESTIONS = [writable_block, make_room]
