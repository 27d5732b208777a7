"""Hidden checks of lab 1: the allocator, block tables, copy on write, preemption.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require

LAB = "lab1_paged_attention"


def pool_log(num_blocks: int, script: list) -> list:
    """Driver: play a script on a BlockAllocator. A block is named by its place in the order of being handed out."""
    pool, blocks, log = BlockAllocator(num_blocks), [], []
    for action, argument in script:
        try:
            if action == "allocate":
                taken = [int(b) for b in pool.allocate(argument)]
                blocks += taken
                log.append(["ok", taken, int(pool.num_free)])
            else:
                getattr(pool, action)(blocks[argument])
                log.append(["ok", [], int(pool.num_free)])
        except Exception as error:
            log.append([type(error).__name__, [], int(pool.num_free)])
    return log


class PoolModel:
    """What a correct pool would do, by counting owners of handed-out blocks, whatever their numbers are."""

    def __init__(self, size: int, seed: int):
        self.rng, self.free = random.Random(seed), size
        self.owners: list[int] = []  # of each handle
        self.script: list[list] = []
        self.expected: list[tuple[str, int]] = []

    def act(self) -> None:
        live = [h for h, n in enumerate(self.owners) if n]
        dead = [h for h, n in enumerate(self.owners) if not n]
        kind = self.rng.random()
        if kind < 0.4 or not live:
            self._allocate(self.rng.randint(1, 4))
        elif kind < 0.55:
            self._do("share", self.rng.choice(live), 1)
        elif kind < 0.9 or not dead:
            self._do("free", self.rng.choice(live), -1)
        else:  # only if its block was not handed out again, else freeing it is legal
            self._allocate(self.free + 1)

    def _allocate(self, count: int) -> None:
        self.script.append(["allocate", count])
        if count > self.free:
            self.expected.append(("OutOfBlocks", self.free))
            return
        self.free -= count
        self.owners += [1] * count
        self.expected.append(("ok", self.free))

    def _do(self, action: str, handle: int, change: int) -> None:
        self.script.append([action, handle])
        self.owners[handle] += change
        self.free += self.owners[handle] == 0
        self.expected.append(("ok", self.free))


@hidden_check(LAB, "block_allocator")
def long_histories(remote: Remote) -> None:
    model = PoolModel(9, seed=21)
    for _ in range(150):
        model.act()
    log = remote.call(pool_log, 9, model.script)
    for (action, argument), (outcome, _taken, free), want in zip(model.script, log, model.expected, strict=True):
        require(
            (outcome, free) == want,
            f"{action}({argument}): {outcome} with {free} free, {want[0]} with {want[1]} expected",
        )


@hidden_check(LAB, "block_allocator")
def owned_blocks_are_distinct(remote: Remote) -> None:
    script = [["allocate", 3], ["free", 1], ["free", 0], ["allocate", 2], ["allocate", 2]]
    log = remote.call(pool_log, 5, script)
    held = [log[0][1][2], *log[3][1], *log[4][1]]
    require(sorted(held) == [0, 1, 2, 3, 4], f"5 blocks in use are {held}: some block is lost or was handed out twice")


@hidden_check(LAB, "block_allocator")
def misuse_is_refused(remote: Remote) -> None:
    script = [
        ["allocate", 2],
        ["free", 0],
        ["free", 0],
        ["share", 0],
        ["allocate", 3],
        ["share", 1],
        ["free", 1],
        ["free", 1],
    ]
    outcomes = [entry[0] for entry in remote.call(pool_log, 3, script)]
    want = ["ok", "ok", "ValueError", "ValueError", "OutOfBlocks", "ok", "ok", "ok"]
    require(outcomes == want, f"{[s[0] for s in script]} gave {outcomes}, {want} expected")


def grow(steps: list[int], block_size: int, supply: list[int]) -> list:
    """Driver: append tokens step by step. Gives the slots and the table of each step; [] where blocks ran out."""
    from labkit.sequences import OutOfBlocks

    left, held = list(supply), 0
    table: list[int] = []
    log: list = []

    def allocate(count):
        if count > len(left):
            raise OutOfBlocks("none left")
        return [left.pop(0) for _ in range(count)]

    for new in steps:
        try:
            slots = [int(s) for s in append_slots(table, held, new, block_size, allocate)]
            held += new
            log.append([slots, list(table)])
        except OutOfBlocks:
            log.append([[], list(table)])
    return log


@hidden_check(LAB, "append_slots")
def growth_of_a_table(remote: Remote) -> None:
    supply = [12, 3, 40, 7, 0, 21]
    log = remote.call(grow, [7, 1, 1, 8, 0, 1, 25, 3], 8, supply)
    held = 0
    for step, (new, (slots, table)) in enumerate(zip([7, 1, 1, 8, 0, 1, 25, 3], log, strict=True)):
        need = -(-(held + new) // 8)
        want = [supply[p // 8] * 8 + p % 8 for p in range(held, held + new)]
        require(table == supply[:need], f"step {step}: table {table}, {supply[:need]} expected")
        require(slots == want, f"step {step}: slots {slots}, {want} expected")
        held += new


@hidden_check(LAB, "append_slots")
def running_out_changes_nothing(remote: Remote) -> None:
    log = remote.call(grow, [4, 9, 4], 4, [5, 6])
    require(
        log[1] == [[], [5]], f"three blocks were needed and one was left: the table became {log[1][1]}, [5] expected"
    )
    require(log[2] == [[24, 25, 26, 27], [5, 6]], f"after that refusal four more tokens gave {log[2]}")


def write_log(table: list[int], index: int, refs: list[int]) -> list:
    """Driver: writable_block on a pool with these reference counts; gives what was done and the end state."""
    from labkit.sequences import OutOfBlocks

    log, counts = [], list(refs)

    class Pool:
        num_free = property(lambda self: counts.count(0))

        def ref_count(self, block):
            return counts[block]

        def allocate(self, count):
            free = [b for b, n in enumerate(counts) if n == 0]
            if count > len(free):
                raise OutOfBlocks("none left")
            for block in free[:count]:
                counts[block] = 1
            return free[:count]

        def free(self, block):
            log.append(["free", block])
            counts[block] -= 1

    try:
        got = writable_block(table, index, Pool(), lambda a, b: log.append(["copy", a, b]))
    except OutOfBlocks:
        got = "OutOfBlocks"
    return [got, table, counts, log]


@hidden_check(LAB, "writable_block")
def shared_blocks_are_copied(remote: Remote) -> None:
    got = remote.call(write_log, [3, 0, 2], 1, [2, 0, 1, 1])
    require(got == [1, [3, 1, 2], [1, 1, 1, 1], [["copy", 0, 1], ["free", 0]]], f"a shared block in the middle: {got}")


@hidden_check(LAB, "writable_block")
def own_blocks_are_not_copied(remote: Remote) -> None:
    got = remote.call(write_log, [1, 2], 0, [0, 1, 5])
    require(got == [1, [1, 2], [0, 1, 5], []], f"a block with one owner: {got}")


@hidden_check(LAB, "writable_block")
def nothing_changes_without_blocks(remote: Remote) -> None:
    got = remote.call(write_log, [1, 0], 1, [3, 1])
    require(got == ["OutOfBlocks", [1, 0], [3, 1], []], f"no block is free: {got}")


def room_log(lengths: list[int], spare: int, block_size: int, new: list[int]) -> list:
    """Driver: make_room on sequences of these lengths, each with room for all but its newest token."""
    from labkit.sequences import OutOfBlocks, Sequence

    per = [-(-(n - 1) // block_size) for n in lengths]
    counts, taken = [1] * sum(per) + [0] * spare, 0

    class Pool:
        num_free = property(lambda self: counts.count(0))

        def allocate(self, count):
            free = [b for b, n in enumerate(counts) if n == 0]
            if count > len(free):
                raise OutOfBlocks("none left")
            for block in free[:count]:
                counts[block] = 1
            return free[:count]

        def free(self, block):
            counts[block] -= 1

    running = []
    for i, n in enumerate(lengths):
        running.append(Sequence(i, list(range(n)), list(range(taken, taken + per[i])), n - 1))
        taken += per[i]
    waiting = [Sequence(100 + i, [0] * n) for i, n in enumerate(new)]
    make_room(running, waiting, Pool(), block_size)

    def state(s):
        return [s.id, len(s.tokens), len(s.block_table), s.num_computed]

    owned = sorted(b for s in running for b in s.block_table)
    return [
        [state(s) for s in running],
        [state(s) for s in waiting],
        counts.count(0),
        owned == sorted(set(owned)),
        min(counts),
    ]


@hidden_check(LAB, "make_room")
def two_victims(remote: Remote) -> None:
    got = remote.call(room_log, [9, 9, 3, 3], 0, 4, [5])
    want = [[[0, 9, 3, 8], [1, 9, 3, 8]], [[2, 3, 0, 0], [3, 3, 0, 0], [100, 5, 0, 0]], 0, True, 1]
    require(got == want, f"lengths 9, 9, 3, 3 with no free block: {got}, {want} expected")


@hidden_check(LAB, "make_room")
def nobody_needs_a_block(remote: Remote) -> None:
    got = remote.call(room_log, [4, 2, 8], 0, 4, [])
    want = [[[0, 4, 1, 3], [1, 2, 1, 1], [2, 8, 2, 7]], [], 0, True, 1]
    require(got == want, f"a full pool in which no sequence crosses a border: {got}, {want} expected")


@hidden_check(LAB, "make_room")
def the_last_preempts_itself(remote: Remote) -> None:
    got = remote.call(room_log, [3, 5], 0, 4, [1, 1])
    want = [[[0, 3, 1, 2]], [[1, 5, 0, 0], [100, 1, 0, 0], [101, 1, 0, 0]], 1, True, 0]
    require(got == want, f"the last arrival is the one that needs a block: {got}, {want} expected")
