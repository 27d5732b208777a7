"""Finding blocks by what they hold."""

from __future__ import annotations

from labkit.checks.contract import Question, require

LAB = "lab1_paged_attention"

prefix_cache = Question(
    "prefix_cache",
    LAB,
    "a block is found by all tokens up to its end, and no owned block is evicted",
    ("labkit.block_pool",),
)


def unowned(block: int) -> int:
    """No block has an owner."""
    return 0


@prefix_cache.invariant("the longest known prefix is found, in whole blocks")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4, 5], [8, 9, 4])
    for tokens, want in (([1, 2, 3, 4, 6], [8, 9]), ([1, 2, 3, 5, 6], [8]), ([1, 3, 3, 4, 5], []), ([1, 2], [])):
        got = list(cache.match(tokens))
        require(got == want, f"match({tokens}) is {got}, {want} expected after insert([1, 2, 3, 4, 5], [8, 9, 4])")


@prefix_cache.invariant("the block that holds the last token is never matched")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4], [8, 9])
    got = list(cache.match([1, 2, 3, 4]))
    require(got == [8], f"match([1, 2, 3, 4]) is {got}, [8] expected: the last token's logits have to be computed")


@prefix_cache.invariant("the same tokens after another beginning are another block", share=2)
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 7, 7, 0], [3, 4, 5])
    got = list(cache.match([5, 6, 7, 7, 0]))
    require(
        got == [],
        f"[5, 6, 7, 7] found {got}: block (7, 7) was registered after (1, 2), so is its key made from its parent's?",
    )
    cache.insert([5, 6, 7, 7, 0], [10, 11, 12])
    got = list(cache.match([5, 6, 7, 7, 1]))
    require(
        got == [10, 11],
        f"after inserting [5, 6, 7, 7] in blocks 10 and 11, match gives {got}: a key ignores its parent",
    )


@prefix_cache.invariant("the chain reaches back to the first token, over any number of blocks")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4, 5, 6, 0], [3, 4, 5, 6])
    cache.insert([9, 9, 3, 4, 5, 6, 0], [10, 11, 12, 13])
    got = list(cache.match([9, 9, 3, 4, 5, 6, 7]))
    require(
        got == [10, 11, 12], f"[9, 9, 3, 4, 5, 6] gave {got}, [10, 11, 12] expected: a key is made from all before it"
    )


@prefix_cache.invariant("keys tell tokens apart, and their order")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 12, 0], [3, 4])
    for tokens in ([11, 2, 0], [12, 1, 0], [112, 0, 0]):
        got = list(cache.match(tokens))
        require(got == [], f"match({tokens}) is {got} after insert([1, 12]): are tokens and their order kept apart?")


@prefix_cache.invariant("a match ends at the first block that is not there")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4, 0], [8, 9, 4])
    cache.evict(lambda block: int(block == 9))
    got = list(cache.match([1, 2, 3, 4, 0]))
    require(got == [], f"block 8 was evicted and 9 is left: match gives {got}, [] expected, since the prefix is gone")


@prefix_cache.invariant("a known prefix keeps its block")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4, 5], [8, 9, 4])
    cache.insert([1, 2, 3, 4, 6], [5, 6, 7])
    got = list(cache.match([1, 2, 3, 4, 0]))
    require(got == [8, 9], f"a second insert of the same prefix changed its blocks to {got}, [8, 9] expected")


@prefix_cache.invariant("a block with an owner is never evicted", share=2)
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 2, 3, 4, 0], [8, 9, 4])
    got = cache.evict(lambda block: int(block != 8))
    require(
        got == 8, f"blocks 8 and 9 are cached and 9 has an owner: evict gave {got}, 8 expected; is ref_count asked?"
    )
    require(
        cache.evict(lambda block: 1) is None, "every block has an owner, and one was evicted from a running request"
    )
    require(answer(2).evict(unowned) is None, "evicting from an empty cache must give None")


@prefix_cache.invariant("the least recently used goes first, and a chain from its end")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 1, 2, 2, 0], [0, 1, 9])
    cache.insert([3, 3, 4, 4, 0], [2, 3, 9])
    cache.match([1, 1, 2, 2, 0])
    got = [cache.evict(unowned) for _ in range(5)]
    require(
        got == [3, 2, 1, 0, None],
        f"evicted in the order {got}, [3, 2, 1, 0, None] expected: use moves, and heads go last",
    )


@prefix_cache.invariant("what was evicted is not found any more")
def _(answer) -> None:
    cache = answer(2)
    cache.insert([1, 1, 2, 2, 0], [0, 1, 9])
    cache.evict(unowned)
    got = list(cache.match([1, 1, 2, 2, 0]))
    require(got == [0], f"after one eviction match gives {got}, [0] expected")


QUESTIONS = [prefix_cache]
