"""Hidden checks of lab 5: capacity, preemptions, prefix hits."""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require
from labkit.checks.lab5_vllm_serving.capacity import expected
from labkit.checks.lab5_vllm_serving.pressure import judge
from labkit.models import ModelShape

LAB = "lab5_vllm_serving"


def capacity_of(layers: int, attending: int, heads: int, dim: int, rest: list) -> list:
    """Driver: the answer on a shape that is made there; the name of the error if it raises."""
    from labkit.models import ModelShape

    try:
        return list(kv_capacity(ModelShape("unseen", layers, 4 * heads, heads, dim, attending), *rest))
    except ValueError:
        return ["ValueError"]


@hidden_check(LAB, "kv_capacity")
def unseen_models(remote: Remote) -> None:
    rng = random.Random(51)
    for _ in range(8):
        layers, heads, dim = rng.randint(2, 60), rng.randint(1, 9), rng.choice([64, 96, 128])
        attending = rng.randint(1, layers)
        rest = [rng.randint(10**9, 10**11), rng.randint(0, 10**9), rng.choice([16, 32, 400]), rng.randint(50, 9000)]
        rest.append(rng.choice([1, 2]))
        got = remote.call(capacity_of, layers, attending, heads, dim, rest)
        shape = ModelShape("unseen", layers, 4 * heads, heads, dim, attending)
        tokens, concurrency = expected(shape, *rest)
        if concurrency < 1:
            require(got == ["ValueError"], f"not one request fits, and the answer was {got!r}")
        else:
            close = len(got) == 2 and got[0] == tokens and abs(got[1] - concurrency) < 1e-9 * concurrency
            require(
                close,
                f"{attending} of {layers} layers, {heads} KV heads of {dim}: {got!r}, {tokens, concurrency} expected",
            )


@hidden_check(LAB, "overcommit")
def unseen_servers(remote: Remote) -> None:
    rng = random.Random(52)
    for _ in range(6):
        size, sequences = rng.choice([16, 32, 64]), rng.randint(2, 40)
        blocks = rng.randint(sequences + 3, 20 * sequences)
        length = min(blocks - 1, 2 + 2 * blocks // sequences) * size
        got = remote.call(load_of, blocks, size, sequences, length)
        judge(tuple(got), blocks, size, sequences, length)


def load_of(blocks: int, size: int, sequences: int, length: int) -> list:
    """Driver: the answer as a list of plain numbers."""
    return [int(n) for n in overcommit(blocks, size, sequences, length)]


def reason_of(old: list, new: list, size: int, words: list) -> list:
    """Driver: the answer with a vocabulary of these words."""
    hit, reason = why_missed(list(old), list(new), size, lambda ids: "".join(words[i] for i in ids))
    return [int(hit), str(reason)]


WORDS = ["", "x", "y", "xy", "z", "书", "馆", "书馆"]


@hidden_check(LAB, "why_missed")
def unseen_pairs(remote: Remote) -> None:
    rng = random.Random(53)
    seen = set()
    for _ in range(60):
        size = rng.choice([2, 4, 8])
        old = [rng.randint(1, 7) for _ in range(rng.randint(1, 30))]
        at = rng.choice([0, size, 2 * size, rng.randint(0, 30)])
        new = old[:at] + rng.choice([[3, 4, 4], [4] * 9, [1, 2] * 6, old[at:] + [4] * 9, split(old[at:]) + [4] * 9])
        if not new:
            continue
        want = reason(old, new, size)
        seen.add(want[1])
        got = remote.call(reason_of, old, new, size, WORDS)
        require(
            got == list(want), f"cached {old}, new {new}, blocks of {size}, words {WORDS}: {got}, {list(want)} expected"
        )
    assert len(seen) == 5, "the pairs of this check do not show all reasons"


def split(ids: list[int]) -> list[int]:
    """The same text in shorter tokens."""
    return [part for i in ids for part in {3: [1, 2], 7: [5, 6]}.get(i, [i])]


def reason(old: list[int], new: list[int], size: int) -> tuple[int, str]:
    """What is to come out, told another way than by the solution."""
    agree = 0
    while agree < min(len(old), len(new)) and old[agree] == new[agree]:
        agree += 1
    differ = agree < len(old) and agree < len(new)
    whole = [n for n in range(0, len(new), size) if n <= agree]
    if whole[-1] + size >= len(new):
        return whole[-1], "all"
    as_text = ["".join(WORDS[i] for i in ids) for ids in (old, new)]
    if differ and as_text[1].startswith(as_text[0]):
        return whole[-1], "seam"
    if differ and agree < size:
        return whole[-1], "drift"
    return whole[-1], "content" if whole[-1] == agree else "granularity"
