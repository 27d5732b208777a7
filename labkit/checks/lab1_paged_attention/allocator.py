"""Blocks: who owns them, and how a request grows."""

from __future__ import annotations

import random
from collections.abc import Callable

from labkit.checks.contract import Question, require
from labkit.sequences import OutOfBlocks

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


QUESTIONS = [block_allocator, append_slots]
