"""Hidden checks of lab 5: the front, and the choice."""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require
from labkit.checks.lab5_vllm_serving.tuning import front

LAB = "lab5_vllm_serving"


def front_of(points: list) -> list:
    """Driver: the answer on tuples."""
    return [int(i) for i in pareto_front([tuple(p) for p in points])]


@hidden_check(LAB, "pareto_front")
def unseen_points(remote: Remote) -> None:
    rng = random.Random(61)
    for most in (3, 30):
        points = [(float(rng.randint(1, most)), float(rng.randint(1, most))) for _ in range(25)]
        got, want = remote.call(front_of, [list(p) for p in points]), front(points)
        require(got == want, f"25 random points: indices {got}, {want} expected")


def choice_of(rows: list, target: float) -> list:
    """Driver: the answer as a list; the name of the error if it raises."""
    try:
        return list(fewest_resources({(a, b): shares for a, b, shares in rows}, target))
    except ValueError:
        return ["ValueError"]


@hidden_check(LAB, "fewest_resources")
def unseen_trials(remote: Remote) -> None:
    rng = random.Random(62)
    for target in (0.5, 0.9, 0.95, 2.0):
        rows = [(a, b, [rng.uniform(0.3, 1.0) for _ in range(2)]) for a in (1, 3, 9) for b in (10, 20, 40, 80)]
        rows[-1] = (9, 80, [0.96, 0.97])
        kept = [(b, a) for a, b, shares in rows if all(share >= target for share in shares)]
        want = [min(kept)[1], min(kept)[0]] if kept else ["ValueError"]
        got = remote.call(choice_of, rows, target)
        require(got == want, f"target {target}: {got}, {want} expected")
