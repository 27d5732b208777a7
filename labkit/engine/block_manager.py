"""Which blocks a request owns: the pool of labkit.block_pool, as the scheduler uses it."""

from __future__ import annotations

from labkit.block_pool import BlockPool
from labkit.engine.counters import Counters
from labkit.engine.requests import Request
from labkit.sequences import OutOfBlocks


class BlockManager:
    """Gives requests blocks and takes them back; every method does all of its work, or nothing and says so.

    prefix_caching: whether full blocks are found again by their content. counters: prefix queries and hits go there.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool, counters: Counters):
        self.pool = BlockPool(num_blocks, block_size)
        self.prefix_caching = prefix_caching
        self._counters = counters

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.pool.block_size)

    def grow(self, request: Request, num_tokens: int) -> bool:
        """Let the request own room for its first num_tokens tokens. False if the pool has too few free blocks."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing <= 0:
            return True
        try:
            request.block_table += self.pool.allocate(missing)
        except OutOfBlocks:
            return False
        return True

    def owed(self, request: Request) -> int:
        """Blocks that a running request still needs for the tokens it has."""
        return max(0, self.blocks_for(len(request)) - len(request.block_table))

    def admit(self, request: Request, budget: int, spare: int) -> int:
        """Blocks for a waiting request's cached prefix and for a first chunk of at most `budget` tokens after it.

        spare: blocks that must stay free. Gives the chunk's length; 0 if all that the request has so far does not fit,
        and then nothing changed: one whose first chunk alone fits would be preempted before its last (vLLM's
        full_sequence_must_fit, vllm-project/vllm#21793).
        """
        prefix = self.pool.match_prefix(request.tokens, request.hashes) if self.prefix_caching else []
        cached = len(prefix) * self.pool.block_size
        chunk = min(len(request) - cached, budget)
        if self.blocks_for(len(request)) - len(prefix) + spare > self.pool.num_free:
            self.pool.release(prefix)
            return 0
        request.block_table = prefix + self.pool.allocate(self.blocks_for(cached + chunk) - len(prefix))
        request.num_computed = request.cached = cached
        if self.prefix_caching:
            self._counters.prefix_queries += len(request)
            self._counters.prefix_hits += cached
        return chunk

    def remember(self, request: Request, start: int, end: int) -> None:
        """Make the blocks that tokens start .. end have filled findable by their content."""
        size = self.pool.block_size
        if self.prefix_caching and end // size > start // size:
            self.pool.register(request.tokens[:end], request.block_table, request.hashes)

    def release(self, request: Request) -> None:
        """Take all blocks back; their content stays in the prefix cache until they are needed."""
        table, request.block_table, request.num_computed = request.block_table, [], 0
        self.pool.release(table)
