"""The shipped block pool: no block is lost, every owner is counted, and errors change nothing."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from labkit.block_pool import BlockPool, chained_hashes
from labkit.sequences import OutOfBlocks

BLOCK_SIZE, NUM_BLOCKS = 4, 12


class PoolMachine(RuleBasedStateMachine):
    """Sequences that start with a matched prefix, grow, register and leave, in any order."""

    def __init__(self):
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS, BLOCK_SIZE)
        self.live: list[tuple[list[int], list[int]]] = []  # tokens, block_table
        self.content: dict[int, tuple[int, ...]] = {}  # tokens up to the end of each full block, by block

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=20))
    def start(self, tokens):
        matched = self.pool.match_prefix(tokens)
        for i, block in enumerate(matched):
            assert self.content[block] == tuple(tokens[: (i + 1) * BLOCK_SIZE]), (
                "a block with other content was matched"
            )
        assert len(matched) * BLOCK_SIZE < len(tokens), "the last token was matched"
        missing = -(-len(tokens) // BLOCK_SIZE) - len(matched)
        try:
            table = matched + self.pool.allocate(missing)
        except OutOfBlocks:
            self.pool.release(matched)
            return
        self.pool.register(tokens, table)
        for i, block in enumerate(table):
            if (i + 1) * BLOCK_SIZE <= len(tokens):
                self.content[block] = tuple(tokens[: (i + 1) * BLOCK_SIZE])
        self.live.append((tokens, table))

    @precondition(lambda self: self.live)
    @rule(which=st.integers(0, 100))
    def leave(self, which):
        _, table = self.live.pop(which % len(self.live))
        self.pool.release(table)

    @invariant()
    def every_block_is_owned_as_often_as_it_is_used(self):
        owners = [0] * NUM_BLOCKS
        for _, table in self.live:
            for block in table:
                owners[block] += 1
        assert [self.pool.ref_count(b) for b in range(NUM_BLOCKS)] == owners
        assert self.pool.num_free == owners.count(0)


PoolMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
TestPoolMachine = PoolMachine.TestCase


def test_running_out_changes_nothing():
    pool = BlockPool(4)
    held = pool.allocate(3)
    with pytest.raises(OutOfBlocks, match="2 blocks asked for, 1 of 4 are free"):
        pool.allocate(2)
    assert pool.num_free == 1
    assert sorted(held + pool.allocate(1)) == [0, 1, 2, 3]


@pytest.mark.parametrize("misuse", ["free", "share"])
def test_a_free_block_can_be_neither_freed_nor_shared(misuse):
    with pytest.raises(ValueError, match="block 0 is free"):
        getattr(BlockPool(2), misuse)(0)


def test_a_block_that_does_not_exist_is_named():
    with pytest.raises(ValueError, match=r"block must be in 0\.\.1, got 7"):
        BlockPool(2).ref_count(7)


def test_a_pool_without_blocks_is_refused():
    with pytest.raises(ValueError, match="num_blocks and block_size must be at least 1, got 0 and 16"):
        BlockPool(0)


def test_a_cached_block_outlives_its_owner_and_is_evicted_last():
    pool = BlockPool(3, block_size=2)
    table = pool.allocate(2)
    pool.register([1, 2, 3, 4], table)
    pool.release(table)
    assert pool.num_free == 3
    assert pool.match_prefix([1, 2, 3, 4, 5]) == table, "what was just freed is still known"
    pool.release(table)
    pool.allocate(2)  # takes the block that was never used, then the end of the chain
    assert pool.match_prefix([1, 2, 3, 4, 5]) == table[:1], "the head of the chain goes last"


@settings(deadline=None)
@given(st.lists(st.integers(0, 5), max_size=30), st.integers(1, 6))
def test_equal_hashes_mean_equal_prefixes(tokens, block_size):
    changed = [tokens[0] + 1, *tokens[1:]] if tokens else []
    same = list(chained_hashes(tokens, block_size))
    assert same == list(chained_hashes(list(tokens), block_size))
    assert len(same) == len(tokens) // block_size
    assert not set(same) & set(chained_hashes(changed, block_size)), (
        "a change in the first token must change every hash"
    )
