"""A small trace played through a block allocator, one snapshot a step: what the pool widget draws."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field

from labkit.sequences import OutOfBlocks, Sequence


@dataclass(frozen=True)
class Arrival:
    """A request of the trace.

    step: when it arrives. prompt: its tokens; equal beginnings are shared. output_len: tokens it generates.
    """

    step: int
    prompt: tuple[int, ...]
    output_len: int


@dataclass(frozen=True)
class Snapshot:
    """The pool after one step. owners: for each block, the ids of the sequences that own it. filled: tokens in it."""

    step: int
    block_size: int
    owners: tuple[tuple[int, ...], ...]
    filled: tuple[int, ...]
    running: tuple[int, ...]
    waiting: tuple[int, ...]
    event: str

    @property
    def free(self) -> int:
        """Blocks without an owner."""
        return sum(not o for o in self.owners)

    @property
    def shared(self) -> int:
        """Blocks with more than one owner."""
        return sum(len(o) > 1 for o in self.owners)

    @property
    def wasted(self) -> int:
        """Token slots in owned blocks that hold no token."""
        return sum(self.block_size - f for o, f in zip(self.owners, self.filled, strict=True) if o)


@dataclass
class PoolTrace:
    """Snapshots of a whole run, and whose allocator made them."""

    steps: list[Snapshot] = field(default_factory=list)
    note: str = ""
    preemptions: list[int] = field(default_factory=list)  # indices into steps

    @property
    def first_preemption(self) -> int:
        """Index of the last step before the first preemption; the last step if there is none."""
        return max(self.preemptions[0] - 1, 0) if self.preemptions else len(self.steps) - 1


SYSTEM_PROMPT = tuple(range(100, 112))  # shared by three requests of the trace below

DEMO = (
    Arrival(0, (*SYSTEM_PROMPT, 1, 2), 26),
    Arrival(1, (*SYSTEM_PROMPT, 3), 22),
    Arrival(3, tuple(range(200, 209)), 24),
    Arrival(5, (*SYSTEM_PROMPT, 4, 5, 6), 14),
    Arrival(6, tuple(range(300, 318)), 12),
    Arrival(9, tuple(range(400, 406)), 20),
)


class _Run:
    """Plays arrivals through a pool: admits in order, generates a token a step, preempts the last arrival when full."""

    def __init__(self, pool, num_blocks: int, block_size: int, arrivals: Sized[Arrival]):
        self.pool, self.num_blocks, self.block_size = pool, num_blocks, block_size
        self.arrivals = arrivals
        self.running: list[Sequence] = []
        self.waiting: list[Sequence] = []
        self.events: list[str] = []
        self.preempted = False

    def step(self, now: int) -> Snapshot:
        self.events, self.preempted = [], False
        for i, a in enumerate(self.arrivals):
            if a.step == now:
                self.waiting.append(Sequence(i, list(a.prompt)))
        self._retire()
        for sequence in self.running:
            sequence.tokens.append(1000 * (sequence.id + 1) + len(sequence))
        self._make_room()
        while self.waiting and not self.preempted and self._admit(self.waiting[0]):
            self.running.append(self.waiting.pop(0))
        return self._snapshot(now)

    def _retire(self) -> None:
        for sequence in [s for s in self.running if len(s) >= self._final(s)]:
            self._release(sequence)
            self.running.remove(sequence)
            self.events.append(f"request {sequence.id} is done")

    def _final(self, sequence: Sequence) -> int:
        arrival = self.arrivals[sequence.id]
        return len(arrival.prompt) + arrival.output_len

    def _make_room(self) -> None:
        served = 0
        while served < len(self.running):
            sequence = self.running[served]
            try:
                sequence.block_table += self.pool.allocate(self._missing(sequence))
                served += 1
            except OutOfBlocks:
                victim = self.running.pop()
                self._release(victim)
                self.waiting.insert(0, victim)
                self.preempted = True
                self.events.append(f"no block left: request {victim.id} is preempted")

    def _missing(self, sequence: Sequence) -> int:
        return math.ceil(len(sequence) / self.block_size) - len(sequence.block_table)

    def _admit(self, sequence: Sequence) -> bool:
        shared = self._shared_prefix(sequence)
        missing = math.ceil(len(sequence) / self.block_size) - len(shared)
        if missing > self.pool.num_free:
            return False
        for block in shared:
            self.pool.share(block)
        sequence.block_table = shared + self.pool.allocate(missing)
        more = f", sharing {len(shared)} blocks" if shared else ""
        self.events.append(f"request {sequence.id} starts{more}")
        return True

    def _shared_prefix(self, sequence: Sequence) -> list[int]:
        """Full blocks of a running sequence that begins with the same tokens; the last token is never shared."""
        best: list[int] = []
        for other in self.running:
            equal = 0
            for mine, theirs in zip(sequence.tokens[:-1], other.tokens, strict=False):
                if mine != theirs:
                    break
                equal += 1
            if equal // self.block_size > len(best):
                best = other.block_table[: equal // self.block_size]
        return list(best)

    def _release(self, sequence: Sequence) -> None:
        for block in sequence.block_table:
            self.pool.free(block)
        sequence.block_table = []

    def _snapshot(self, now: int) -> Snapshot:
        owners: list[list[int]] = [[] for _ in range(self.num_blocks)]
        filled = [0] * self.num_blocks
        for sequence in self.running:
            for i, block in enumerate(sequence.block_table):
                owners[block].append(sequence.id)
                filled[block] = min(self.block_size, len(sequence) - i * self.block_size)
        ids = tuple(s.id for s in self.running), tuple(s.id for s in self.waiting)
        event = "; ".join(self.events) or "each running request adds a token"
        return Snapshot(now, self.block_size, tuple(map(tuple, owners)), tuple(filled), *ids, event)


def play(pool, num_blocks: int, block_size: int, arrivals: Sized[Arrival] = DEMO, max_steps: int = 200) -> PoolTrace:
    """Play `arrivals` through `pool` (allocate, share, free, num_free) until all are done.

    Raises RuntimeError when they are not done after max_steps: some request can never fit.
    """
    run, trace = _Run(pool, num_blocks, block_size, arrivals), PoolTrace()
    last_arrival = max(a.step for a in arrivals)
    for now in range(max_steps):
        trace.steps.append(run.step(now))
        if run.preempted:
            trace.preemptions.append(len(trace.steps) - 1)
        if now >= last_arrival and not run.running and not run.waiting:
            return trace
    raise RuntimeError(
        f"requests {[s.id for s in run.waiting]} are not done after {max_steps} steps: do they fit at all?"
    )
