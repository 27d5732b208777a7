"""Blocks: who owns them, how a request grows, copy on write, preemption."""

from __future__ import annotations

import random
from collections.abc import Callable

from labkit.checks.contract import Question, require
from labkit.sequences import OutOfBlocks, Sequence

LAB = "lab1_paged_attention"
SHIPPED = ("labkit.block_pool",)

block_allocator = Question(
    "block_allocator", LAB, "no block is handed out twice, none is lost, and what must not happen is refused", SHIPPED
)


def refuses(error: type[Exception], action: Callable[[], object], what: str) -> None:
    """Require that `action` raises `error`."""
    try:
        got = action()
    except error:
        return
    require(False, f"{what} must raise {error.__name__}, but gave {got!r}")


@block_allocator.invariant("no block is handed out twice")
def _(answer) -> None:
    pool = answer(6)
    blocks = pool.allocate(2) + pool.allocate(1) + pool.allocate(3)
    require(all(b in range(6) for b in blocks), f"blocks {blocks} of a pool of 6, whose blocks are named 0 to 5")
    require(sorted(blocks) == list(range(6)), f"6 blocks taken from a pool of 6 are {blocks}, not each of 0..5 once")


@block_allocator.invariant("a freed block is used again, and none is lost")
def _(answer) -> None:
    pool, rng = answer(8), random.Random(1)
    held: list[int] = []
    for step in range(300):
        if held and rng.random() < 0.5:
            pool.free(held.pop(rng.randrange(len(held))))
        elif len(held) < 8:
            [block] = pool.allocate(1)
            require(block not in held, f"step {step}: block {block} is in use and was handed out again")
            held.append(block)
        require(
            pool.num_free == 8 - len(held), f"step {step}: {len(held)} of 8 in use, but num_free is {pool.num_free}"
        )


@block_allocator.invariant("a double free is refused and changes nothing")
def _(answer) -> None:
    pool = answer(3)
    [a, b] = pool.allocate(2)
    pool.free(a)
    refuses(ValueError, lambda: pool.free(a), "freeing a free block")
    require(pool.num_free == 2, f"after a refused double free num_free is {pool.num_free}, 2 expected")
    require(pool.ref_count(b) == 1, "a refused double free changed the count of another block")
    require(sorted([*pool.allocate(2), b]) == [0, 1, 2], "a block freed twice was handed out twice")


@block_allocator.invariant("running out is an error that changes nothing")
def _(answer) -> None:
    pool = answer(4)
    pool.allocate(1)
    refuses(OutOfBlocks, lambda: pool.allocate(4), "asking for 4 blocks when 3 are free")
    require(
        pool.num_free == 3, f"after a refused allocate num_free is {pool.num_free}, 3 expected: some blocks are lost"
    )
    require(len(set(pool.allocate(3))) == 3, "after a refused allocate the 3 free blocks could not all be had")


@block_allocator.invariant("a shared block is free only when its last owner lets go")
def _(answer) -> None:
    pool = answer(2)
    [a] = pool.allocate(1)
    pool.share(a)
    pool.share(a)
    require(pool.ref_count(a) == 3, f"one owner and two more make {pool.ref_count(a)}, 3 expected")
    pool.free(a)
    pool.free(a)
    require(pool.num_free == 1, "the block was freed while one owner was left")
    pool.free(a)
    require(pool.num_free == 2, "the last owner let go and the block is not free: a reference leaked")
    require(pool.ref_count(a) == 0, f"a free block has {pool.ref_count(a)} owners")


@block_allocator.invariant("two pools know nothing of each other")
def _(answer) -> None:
    one, other = answer(2), answer(3)
    one.allocate(2)
    require(
        other.num_free == 3, f"taking both blocks of one pool left another with {other.num_free} of 3: is state shared?"
    )


@block_allocator.invariant("a free block cannot be shared, and is handed out with one owner")
def _(answer) -> None:
    pool = answer(1)
    refuses(ValueError, lambda: pool.share(0), "sharing a free block")
    [a] = pool.allocate(1)
    require(pool.ref_count(a) == 1, f"a new block has {pool.ref_count(a)} owners, 1 expected")


append_slots = Question(
    "append_slots", LAB, "slots follow the block table, and blocks are taken only at a border", SHIPPED
)


class Blocks:
    """An allocate function that gives given blocks in order, and remembers what it was asked for."""

    def __init__(self, blocks: list[int]):
        self.left = list(blocks)
        self.asked: list[int] = []

    def __call__(self, count: int) -> list[int]:
        self.asked.append(count)
        if count > len(self.left):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self.left)} left")
        taken, self.left = self.left[:count], self.left[count:]
        return taken


@append_slots.invariant("the example of the docstring")
def _(answer) -> None:
    table = [7]
    got = answer(table, 3, 3, 4, Blocks([2]))
    require(list(got) == [31, 8, 9], f"slots {got}, [31, 8, 9] expected: slot = block * block_size + offset")
    require(table == [7, 2], f"the table became {table}, [7, 2] expected: it must grow in place")


@append_slots.invariant("a block is taken when a token crosses the border, not before and not after")
def _(answer) -> None:
    for held, taken in ((15, 0), (16, 1), (17, 0), (0, 1), (31, 0), (32, 1)):
        blocks = Blocks([90, 91])
        table = list(range(40, 40 + -(-held // 16)))
        answer(table, held, 1, 16, blocks)
        require(
            sum(blocks.asked) == taken,
            f"the token after {held} takes {sum(blocks.asked)} blocks of 16, {taken} expected",
        )


@append_slots.invariant("a table that has room already takes nothing")
def _(answer) -> None:
    blocks, table = Blocks([1, 2]), [5, 9, 7]
    got = list(answer(table, 3, 4, 4, blocks))
    require(got == [23, 36, 37, 38], f"slots {got}, [23, 36, 37, 38] expected")
    require(table == [5, 9, 7] and not sum(blocks.asked), f"the table of three blocks had room, and became {table}")


@append_slots.invariant("a long prompt takes all its blocks at once")
def _(answer) -> None:
    blocks = Blocks(list(range(70, 60, -1)))
    table: list[int] = []
    got = answer(table, 0, 33, 8, blocks)
    want = [table[p // 8] * 8 + p % 8 for p in range(33)] if len(table) == 5 else []
    require(len(table) == 5, f"33 tokens in blocks of 8 got {len(table)} blocks, 5 expected")
    require(list(got) == want, f"slots {list(got)[:10]}..., {want[:10]}... expected")


@append_slots.invariant("when blocks run out the table is as it was")
def _(answer) -> None:
    table, blocks = [3], Blocks([5, 6])
    refuses(OutOfBlocks, lambda: answer(table, 4, 9, 4, blocks), "growing by three blocks where two are left")
    require(table == [3], f"after OutOfBlocks the table is {table}, [3] expected")
    require(blocks.left == [5, 6], f"after OutOfBlocks blocks {blocks.left} are left of [5, 6]: the others are lost")


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


QUESTIONS = [block_allocator, append_slots, writable_block, make_room]
