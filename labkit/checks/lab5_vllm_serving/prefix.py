"""Prefix-cache hits, and the reason of each miss."""

from __future__ import annotations

from labkit.checks.contract import Question, require

LAB = "lab5_vllm_serving"

why_missed = Question("why_missed", LAB, "the hit is counted in whole blocks, and what ended it is named")

# A vocabulary in which "ab" is one token, or two: what a tokenizer does to a text depends on what stands around it.
WORDS = {1: "a", 2: "b", 3: "ab", 4: "c", 5: "d", 6: "e", 7: "f", 8: "北", 9: "京", 10: "北京"}


def text(ids: list[int]) -> str:
    """The text of token ids, as the tokenizer of the checks has it."""
    return "".join(WORDS[i] for i in ids)


def _gives(answer, old: list[int], new: list[int], size: int, want: tuple[int, str], look_at: str) -> None:
    got = answer(list(old), list(new), size, text)
    good = isinstance(got, tuple | list) and tuple(got) == want
    require(good, f"cached {_ids(old)}, new {_ids(new)}, blocks of {size}: {got!r}, {want!r} expected; {look_at}")


def _ids(ids: list[int]) -> str:
    return str(ids) if len(ids) <= 16 else f"{len(ids)} ids"


@why_missed.invariant("whole blocks only, and the last token is always computed")
def _(answer) -> None:
    old = [4, 5, 6, 7] * 3
    _gives(answer, old, [*old, 4], 4, (12, "all"), "12 tokens in 3 blocks are found, and one is left to compute")
    _gives(answer, old, old, 4, (8, "all"), "the whole prompt is cached, but its last token must be computed")
    _gives(answer, old, old[:3], 4, (0, "all"), "a prompt shorter than a block has no block to find")


@why_missed.invariant("a difference in the first block is a drift of the template")
def _(answer) -> None:
    look_at = "nothing can be shared when the first block differs, however much is equal after it"
    _gives(answer, [5, *[4] * 11], [6, *[4] * 11], 4, (0, "drift"), look_at)
    _gives(answer, [4, 4, 5, *[4] * 9], [4, 4, 6, *[4] * 9], 4, (0, "drift"), look_at)


@why_missed.invariant("the same text in other tokens is a seam", share=2)
def _(answer) -> None:
    old = [4, 5, 6, 7, 1, 2, 4, 4]
    look_at = "the new text begins with the whole old text, but its tokens do not"
    _gives(answer, old, [4, 5, 6, 7, 3, 4, 4, 5, 5, 5], 4, (4, "seam"), look_at)
    _gives(answer, [4, 5, 6, 7, 4, 8], [4, 5, 6, 7, 4, 10, 4, 4, 4, 4], 4, (4, "seam"),
           "the old text ended in 北, and what came after made it 北京, one token")  # fmt: skip
    _gives(answer, [4, 5, 6, 7, 8, 9, 4, 4], [4, 5, 6, 7, 10, 4, 4, 4, 4], 4, (4, "seam"), look_at)


@why_missed.invariant("the first reason that applies is given")
def _(answer) -> None:
    _gives(answer, [4, 1, 2, 4, 4, 4], [4, 3, 4, 4, 4, 5, 5, 5, 5], 4, (0, "seam"),
           "the first block differs, and the new text still begins with the old one: seam before drift")  # fmt: skip
    _gives(answer, [4, 5, 6, 7, 1, 2], [4, 5, 6, 7, 3, 4], 4, (4, "all"),
           "the one whole block was found, so the seam after it has cost nothing: all before seam")  # fmt: skip
    _gives(answer, [4, 4, 5, 4], [4, 4, 6, 4, 5, 5], 4, (0, "drift"),
           "two ids agree and fill no block, since the first block differs: drift before granularity")  # fmt: skip


@why_missed.invariant("tokens that agree in a block that is not full are lost to granularity")
def _(answer) -> None:
    old = [4, 5, 6, 7, 4, 5, 6, 7]
    look_at = "they agree past the hit, but not to the end of a block"
    _gives(answer, old, [4, 5, 6, 7, 4, 5, 7, 7, 7], 4, (4, "granularity"), look_at)
    _gives(answer, old[:6], [*old[:6], 4, 4, 4, 4], 4, (4, "granularity"), look_at)
    _gives(
        answer, old[:2], [*old[:2], 4, 4, 4, 4], 4, (0, "granularity"), "all that was cached agrees, and fills no block"
    )


@why_missed.invariant("a difference at the border of a block loses nothing")
def _(answer) -> None:
    old = [4, 5, 6, 7, 4, 5, 6, 7]
    look_at = "every token that agrees was found: what follows is new content"
    _gives(answer, old, [4, 5, 6, 7, 5, 5, 6, 7, 7], 4, (4, "content"), look_at)
    _gives(answer, old[:4], [*old[:4], 5, 5, 5, 5, 5], 4, (4, "content"), look_at)


@why_missed.invariant("other block sizes")
def _(answer) -> None:
    old = [4, 5] * 32
    new = [*old[:40], 6, *old[41:]]
    _gives(answer, old, new, 16, (32, "granularity"), "the first 40 ids agree, two blocks of 16 are found")
    _gives(answer, old, new, 8, (40, "content"), "the first 40 ids agree, and are five whole blocks of 8")
    _gives(answer, old, new, 128, (0, "all"), "64 tokens do not fill a block of 128")


QUESTIONS = [why_missed]
