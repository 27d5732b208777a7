"""The fewest resources that keep an objective."""

from __future__ import annotations

import random

from labkit.checks.contract import Question, require

LAB = "lab5_vllm_serving"

pareto_front = Question("pareto_front", LAB, "what nothing beats in both respects stays, and nothing else")
fewest_resources = Question("fewest_resources", LAB, "the cheapest setting whose every run keeps the objective")


def front(points: list[tuple[float, float]]) -> list[int]:
    """Indices of points (cost, value) that no other beats, by cost."""
    kept = [
        i
        for i, (c, v) in enumerate(points)
        if not any(d <= c and w >= v and (d, w) != (c, v) for d, w in points) and points.index((c, v)) == i
    ]
    return sorted(kept, key=lambda i: points[i])


def _front(answer, points: list[tuple[float, float]], look_at: str) -> None:
    got, want = list(answer(list(points))), front(points)
    require(got == want, f"{points}: indices {got}, {want} expected; {look_at}")


@pareto_front.invariant("dominated points leave")
def _(answer) -> None:
    _front(answer, [(1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)], "cost 3 buys less than cost 2 does")


@pareto_front.invariant("equal value at a higher cost, and equal cost at a lower value, are dominated")
def _(answer) -> None:
    _front(answer, [(1, 2.0), (2, 2.0), (3, 5.0)], "the same value for more cost is beaten")
    _front(answer, [(1, 2.0), (1, 3.0), (3, 5.0)], "of one cost only the best value stays")


@pareto_front.invariant("in any order, of equals the first, sorted by cost")
def _(answer) -> None:
    _front(answer, [(4, 4.0), (1, 1.0), (2, 3.0), (1, 1.0)], "the front comes by rising cost, and a twin once")
    rng = random.Random(5)
    points = [(float(rng.randint(1, 12)), float(rng.randint(1, 12))) for _ in range(40)]
    _front(answer, points, "forty random points")
    _front(answer, [], "no points have an empty front")


TRIALS = {
    (4, 512): [0.40, 0.42],
    (8, 512): [0.99, 0.80],
    (8, 1024): [0.97, 0.96],
    (16, 1024): [1.00, 1.00],
    (16, 512): [0.95, 0.99],
}


def _chosen(answer, trials: dict, target: float, want: object, look_at: str) -> None:
    got = answer(trials, target)
    require(got == want, f"target {target}: {got!r} chosen, {want!r} expected; {look_at}")


@fewest_resources.invariant("every run keeps the objective, not their mean", share=2)
def _(answer) -> None:
    _chosen(answer, TRIALS, 0.85, (16, 512), "(8, 512) kept it once of twice, so it does not keep it")


@fewest_resources.invariant("the fewest blocks, then the fewest sequences")
def _(answer) -> None:
    _chosen(answer, TRIALS, 0.96, (8, 1024), "a setting is (sequences, blocks): blocks are what memory is paid for")
    _chosen(
        answer,
        {(9, 64): [1.0], (3, 64): [1.0], (1, 128): [1.0]},
        0.9,
        (3, 64),
        "the fewest blocks come first, and of equal blocks the fewest sequences",
    )
    _chosen(answer, TRIALS, 0.95, (16, 512), "the target itself is enough")


@fewest_resources.invariant("nothing that keeps it is said")
def _(answer) -> None:
    for trials, target in ((TRIALS, 1.01), ({}, 0.5), ({(1, 1): []}, 0.5)):
        try:
            got = answer(trials, target)
        except ValueError:
            continue
        require(
            False,
            f"no setting keeps {target}, and the answer was {got!r}, not a ValueError: one never run kept nothing",
        )


QUESTIONS = [pareto_front, fewest_resources]
