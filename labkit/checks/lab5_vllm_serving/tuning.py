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
    require(got == want, f"{str(points)[:160]}: indices {got}, {want} expected; {look_at}")


@pareto_front.invariant("dominated points leave")
def _(answer) -> None:
    _front(answer, [(1, 1.0), (2, 3.0), (3, 2.0), (4, 4.0)], "cost 3 buys less than cost 2 does")
    _front(answer, [(1, 0.0), (2, 3.0), (3, 0.0)], "the cheapest point is never beaten, even if it is worth nothing")


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


TRIALS = {
    (4, 512): [0.40, 0.42],
    (8, 512): [0.99, 0.80],
    (8, 1024): [0.97, 0.96],
    (16, 1024): [1.00, 1.00],
    (16, 512): [0.95, 0.99],
}


NEVER = {(2, 64): [], **TRIALS}


def _chosen(answer, trials: dict, target: float, want: tuple[int, int], look_at: str = "") -> None:
    """look_at: what to say of a choice that is wrong; what is said of one that does not keep the target comes first."""
    got = answer({setting: list(shares) for setting, shares in trials.items()}, target)
    found = tuple(got) if isinstance(got, tuple | list) else got
    if found in trials and found != want:
        shares = trials[found]
        if not shares:
            look_at = "one never run kept nothing"
        elif min(shares) < target:
            look_at = f"its runs gave {shares}: one of them misses the target, so it does not keep it"
    require(found == want, f"target {target}: {got!r} chosen, {want!r} expected; {look_at or FEWEST}")


FEWEST = "the fewest blocks come first, since memory is paid for, and of equal blocks the fewest sequences"


@fewest_resources.invariant("every run keeps the objective, not their mean", share=2)
def _(answer) -> None:
    _chosen(answer, TRIALS, 0.85, (16, 512))


@fewest_resources.invariant("the fewest blocks, then the fewest sequences")
def _(answer) -> None:
    _chosen(answer, {(9, 64): [1.0], (3, 64): [1.0], (1, 128): [1.0]}, 0.9, (3, 64))
    _chosen(
        answer,
        TRIALS,
        0.96,
        (8, 1024),
        "a run that gives 0.96 keeps a target of 0.96; a setting is (sequences, blocks)",
    )


@fewest_resources.invariant("a setting that was never run kept nothing")
def _(answer) -> None:
    _chosen(answer, NEVER, 0.85, (16, 512))


@fewest_resources.invariant("nothing that keeps it is said")
def _(answer) -> None:
    for trials, target in ((TRIALS, 1.01), ({}, 0.5), ({(1, 1): []}, 0.5)):
        try:
            got = answer(trials, target)
        except ValueError:
            continue
        require(
            False,
            f"no setting keeps {target} in {len(trials)} trials, and the answer was {got!r}, not a ValueError: "
            "one never run kept nothing",
        )


QUESTIONS = [pareto_front, fewest_resources]
