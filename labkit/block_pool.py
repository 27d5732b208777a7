"""A pool of KV blocks with reference counts and prefix caching: what one would ship of lab 1.

A block with no owner stays in the cache under the hash of its content until it is needed for something else; the free
queue is in order of last use, so that what is evicted is the block nobody wanted for longest. Idea: Kwon et al., SOSP
2023 (paging, sharing); the automatic prefix cache of vLLM (chained hashes, one free queue for both uses).
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Iterator, Sequence

from labkit.sequences import OutOfBlocks


def chained_hashes(tokens: Sequence[int], block_size: int, known: list[bytes] | None = None) -> Iterator[bytes]:
    """One hash for each full block of `tokens`, made from it and the hash before it: equal means equal prefix.

    known: hashes of the first blocks, which are not computed again; new ones are added to it.
    """
    known = [] if known is None else known
    for i in range(len(tokens) // block_size):
        if i == len(known):
            block = ",".join(map(str, tokens[i * block_size : (i + 1) * block_size]))
            known.append(hashlib.sha256((known[-1] if known else b"") + block.encode()).digest())
        yield known[i]


class BlockPool:
    """num_blocks blocks of block_size tokens each. ValueError for sizes below 1.

    Every method either does all of its work or raises and changes nothing.
    """

    def __init__(self, num_blocks: int, block_size: int = 16):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self._refs = [0] * num_blocks
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))  # least recently used first
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns, cached ones included."""
        return len(self._free)

    def ref_count(self, block: int) -> int:
        """How many owners a block has."""
        return self._refs[self._known(block)]

    def allocate(self, count: int = 1) -> list[int]:
        """Take `count` blocks; what they had cached is forgotten. OutOfBlocks when fewer are free."""
        if count < 0:
            raise ValueError(f"count must not be negative, got {count}")
        if count > len(self._free):
            raise OutOfBlocks(f"{count} blocks asked for, {len(self._free)} of {self.num_blocks} are free")
        blocks = [self._free.popitem(last=False)[0] for _ in range(count)]
        for block in blocks:
            self._refs[block] = 1
            self._forget(block)
        return blocks

    def share(self, block: int) -> None:
        """Add an owner to a block that is in use. ValueError if it is free."""
        if self._refs[self._known(block)] == 0:
            raise ValueError(f"block {block} is free, so it cannot be shared")
        self._refs[block] += 1

    def free(self, block: int) -> None:
        """Drop one owner; the last one puts the block back. ValueError for a block that is free already."""
        if self._refs[self._known(block)] == 0:
            raise ValueError(f"block {block} is free already")
        self._refs[block] -= 1
        if self._refs[block] == 0:
            self._free[block] = None

    def release(self, block_table: Sequence[int]) -> None:
        """Free all blocks of a sequence, the last first: a prefix outlives what was built on it."""
        for block in reversed(block_table):
            self.free(block)

    def match_prefix(self, tokens: Sequence[int], known: list[bytes] | None = None) -> list[int]:
        """Take the cached blocks that hold the longest known prefix of `tokens`, and become an owner of each.

        The last token is never matched, since its logits have to be computed. known: as in `chained_hashes`.
        """
        blocks = []
        for key in chained_hashes(tokens[:-1], self.block_size, known):
            if key not in self._block_of:
                break
            blocks.append(self._block_of[key])
        for block in blocks:
            self._refs[block] += 1
            self._free.pop(block, None)
        return blocks

    def register(self, tokens: Sequence[int], block_table: Sequence[int], known: list[bytes] | None = None) -> None:
        """Make the full blocks of a sequence findable by their content. The first block of a content stays.

        known: as in `chained_hashes`.
        """
        for key, block in zip(chained_hashes(tokens, self.block_size, known), block_table, strict=False):
            if key not in self._block_of and block not in self._hash_of:
                self._block_of[key], self._hash_of[block] = block, key

    def _forget(self, block: int) -> None:
        key = self._hash_of.pop(block, None)
        if key is not None:
            del self._block_of[key]

    def _known(self, block: int) -> int:
        if not 0 <= block < self.num_blocks:
            raise ValueError(f"block must be in 0..{self.num_blocks - 1}, got {block}")
        return block
