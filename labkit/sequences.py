"""The vocabulary of a paged cache that labs, checks and the engine share: a sequence, and the one error of a pool."""

from __future__ import annotations

from dataclasses import dataclass, field


class OutOfBlocks(RuntimeError):
    """A pool has fewer free blocks than were asked for. Whoever raises it has changed nothing."""


@dataclass
class Sequence:
    """A request on its way through the engine.

    id: in order of arrival. tokens: prompt and what was generated so far. block_table: ids of the blocks that hold its
    K and V, in order. num_computed: how many of its tokens have their K and V in the cache.
    """

    id: int
    tokens: list[int] = field(default_factory=list)
    block_table: list[int] = field(default_factory=list)
    num_computed: int = 0

    def __len__(self) -> int:
        return len(self.tokens)
