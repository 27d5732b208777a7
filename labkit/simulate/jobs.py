"""Requests, blocks and a toy model with a paged cache: enough of an engine to see whether a scheduler is right.

The toy model's next token is made from a running hash, kept position by position in the blocks of a request, as K and V
are. A chunk that is left out, computed twice at another place or written into somebody else's block changes every token
after it. So "the same tokens as one request at a time" is exact, and takes microseconds.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

from labkit.sequences import Sequence

VOCAB = 1000
MASK = (1 << 64) - 1


class NoRoom(RuntimeError):
    """A token was to be computed for which its request owns no block."""


@dataclass(eq=False)
class Job(Sequence):
    """A request in a step loop; the names are those of labkit.engine.Request.

    prompt_len: tokens of its prompt. max_tokens: the most it generates. stop: a token that ends it early.
    arrival: the step in which it comes. preemptions: how often it lost its blocks.
    """

    prompt_len: int = 0
    max_tokens: int = 1
    stop: int | None = None
    arrival: int = 0
    preemptions: int = 0

    @property
    def pending(self) -> int:
        """Tokens whose K and V are still to be computed: 1 in decoding."""
        return len(self.tokens) - self.num_computed

    @property
    def output(self) -> list[int]:
        """The tokens generated so far."""
        return self.tokens[self.prompt_len :]

    @property
    def max_len(self) -> int:
        """Tokens that it has at most."""
        return self.prompt_len + self.max_tokens

    @property
    def done(self) -> bool:
        """Whether its answer has ended."""
        return len(self.output) >= self.max_tokens or self.output[-1:] == [self.stop]

    def __repr__(self) -> str:
        return f"Job {self.id} ({self.num_computed} of {len(self.tokens)} tokens computed)"


class Chunk(NamedTuple):
    """Tokens start .. start + length of a request, to be computed in one step."""

    request: Job
    start: int
    length: int


class Blocks:
    """num_blocks blocks of block_size tokens each, with what stands in their slots.

    A released block's slots are wiped, so that whoever reads on in it gets other tokens.
    """

    def __init__(self, num_blocks: int, block_size: int = 4):
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, got {num_blocks} and {block_size}")
        self.num_blocks, self.block_size = num_blocks, block_size
        self.slots = [0] * (num_blocks * block_size)
        self._unowned = list(range(num_blocks))

    @property
    def num_free(self) -> int:
        """Blocks that nobody owns."""
        return len(self._unowned)

    def blocks_for(self, num_tokens: int) -> int:
        """Blocks that hold this many tokens."""
        return -(-num_tokens // self.block_size)

    def grow(self, request: Sequence, num_tokens: int) -> bool:
        """Let the request own room for its first num_tokens tokens. False, and nothing changed, if too few are free."""
        missing = self.blocks_for(num_tokens) - len(request.block_table)
        if missing > len(self._unowned):
            return False
        request.block_table += [self._unowned.pop(0) for _ in range(missing)]
        return True

    def release(self, request: Sequence) -> None:
        """Take all blocks of a request back: none of its tokens is computed then. ValueError if one is free already."""
        for block in request.block_table:
            if block in self._unowned:
                raise ValueError(f"block {block} of request {request.id} is free already")
            self._unowned.append(block)
            self.slots[block * self.block_size : (block + 1) * self.block_size] = [0] * self.block_size
        request.block_table.clear()
        request.num_computed = 0


class PagedModel:
    """Computes chunks through block tables. calls: the chunks of each call so far, as (id, start, length)."""

    def __init__(self, blocks: Blocks):
        self._blocks = blocks
        self.calls: list[list[tuple[int, int, int]]] = []

    def __call__(self, chunks: list[Chunk]) -> list[int]:
        """The token after each chunk, in their order. NoRoom for a token that no block of its request holds."""
        self.calls.append([(c.request.id, c.start, c.length) for c in chunks])
        return [self._compute(*chunk) for chunk in chunks]

    def _compute(self, request: Job, start: int, length: int) -> int:
        if length < 1 or start < 0 or start + length > len(request.tokens):
            raise ValueError(
                f"request {request.id} has {len(request.tokens)} tokens: a chunk of {length} at {start} is none of them"
            )
        state = self._blocks.slots[self._slot(request, start - 1)] if start else 0
        for position in range(start, start + length):
            state = _next_state(state, request.tokens[position])
            self._blocks.slots[self._slot(request, position)] = state
        return _token(state)

    def _slot(self, request: Job, position: int) -> int:
        size = self._blocks.block_size
        if position // size >= len(request.block_table):
            raise NoRoom(f"request {request.id} owns no block for its token {position}: grow before computing")
        return request.block_table[position // size] * size + position % size


def alone(request: Job) -> list[int]:
    """The answer that the toy model gives to this request when it is served by itself."""
    state = 0
    output: list[int] = []
    for token in request.tokens[: request.prompt_len]:
        state = _next_state(state, token)
    while len(output) < request.max_tokens and output[-1:] != [request.stop]:
        output.append(_token(state))
        state = _next_state(state, output[-1])
    return output


def make_jobs(sizes: list[tuple[int, ...]], seed: int = 0) -> list[Job]:
    """Requests with random prompts. sizes: (prompt_len, max_tokens) or (prompt_len, max_tokens, arrival) of each."""
    rng = random.Random(seed)
    jobs = []
    for i, (prompt_len, max_tokens, *arrival) in enumerate(sizes):
        prompt = [rng.randrange(VOCAB) for _ in range(prompt_len)]
        jobs.append(Job(i, prompt, prompt_len=prompt_len, max_tokens=max_tokens, arrival=sum(arrival)))
    return jobs


def _next_state(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x2545F4914F6CDD1D) & MASK
    return state ^ (state >> 29)


def _token(state: int) -> int:
    return (state >> 17) % VOCAB
