"""In which order requests are admitted."""

from __future__ import annotations

import random

from labkit.checks.contract import Question, require
from labkit.serve.plugins.policies import Waiting

LAB = "lab5_vllm_serving"

admission_key = Question("admission_key", LAB, "short jobs go first, and nobody waits for ever")


def order(answer, requests: list[Waiting], patience: float) -> list[str]:
    """Ids in the order of admission. RuntimeError where keys cannot be compared becomes the check's own message."""
    try:
        return [request.id for request in sorted(requests, key=lambda request: answer(request, patience))]
    except TypeError as error:
        require(False, f"two keys cannot be compared ({error}): give keys of one form, tuples of numbers say")
    return []


def expected(requests: list[Waiting], patience: float) -> list[str]:
    """Overdue ones first, the longest waiting ahead; then by the tokens that a request may take at most."""

    def key(r: Waiting) -> tuple[bool, float]:
        overdue = r.waited > patience
        return not overdue, -r.waited if overdue else r.prompt_tokens + r.max_tokens

    return [request.id for request in sorted(requests, key=key)]


def _ordered(answer, requests: list[Waiting], look_at: str, patience: float = 10.0) -> None:
    got, want = order(answer, requests, patience), expected(requests, patience)
    if len(want) <= 5:
        require(got == want, f"{look_at}: admitted {', '.join(got)}, expected {', '.join(want)}")
    at = next((i for i, pair in enumerate(zip(got, want, strict=True)) if pair[0] != pair[1]), 0)
    first, right = (next(r for r in requests if r.id == ids[at]) for ids in (got, want))
    require(got == want, f"{look_at}: number {at} to be admitted is {first}, {right} expected")


@admission_key.invariant("a short prompt goes before a long one")
def _(answer) -> None:
    _ordered(
        answer, [Waiting("long", 900, 10, 3.0), Waiting("short", 20, 10, 1.0)], "910 tokens against 30, nobody overdue"
    )


@admission_key.invariant("what a request may generate counts as well")
def _(answer) -> None:
    found = [Waiting("chatty", 20, 1000, 1.0), Waiting("brief", 300, 10, 1.0)]
    _ordered(answer, found, "20 + 1000 tokens against 300 + 10")


@admission_key.invariant("who has waited longer than patience goes first, whatever its size")
def _(answer) -> None:
    found = [Waiting("tiny", 1, 1, 0.0), Waiting("huge", 5000, 5000, 10.5)]
    _ordered(answer, found, "10.5 s of waiting, 10 s of patience")
    _ordered(answer, [found[0], Waiting("huge", 5000, 5000, 10.0)], "exactly 10 s of waiting is not longer than 10 s")


@admission_key.invariant("of those that are overdue, the longest waiting goes first")
def _(answer) -> None:
    found = [Waiting("a", 5, 5, 12.0), Waiting("b", 900, 900, 30.0), Waiting("c", 50, 50, 20.0)]
    _ordered(answer, found, "all three are overdue: their size no longer counts")


@admission_key.invariant("random queues")
def _(answer) -> None:
    rng = random.Random(4)
    for patience in (0.5, 5.0, 1e9):
        found = [
            Waiting(str(n), rng.randint(1, 4000), rng.randint(1, 2000), round(rng.uniform(0, 12), 3)) for n in range(30)
        ]
        _ordered(answer, found, f"30 random requests, patience {patience:g} s", patience)


QUESTIONS = [admission_key]
