"""Who is admitted next: a policy puts waiting tickets in order, and knows nothing else of the server."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from labkit.simulate.traffic import Ticket

Policy = Callable[[list[Ticket], float], list[Ticket]]
"""(waiting, now in seconds) -> the same tickets, the one to admit first in front."""
Predict = Callable[[list[Ticket]], list[float]]
"""Seconds, or anything that grows with them, for each ticket."""


def fcfs(waiting: list[Ticket], now: float) -> list[Ticket]:
    """First come, first served."""
    return sorted(waiting, key=lambda t: t.id)


def known(tickets: list[Ticket]) -> list[float]:
    """What no server knows, the length of each answer: for comparison only."""
    return [float(t.output_len) for t in tickets]


def predicted(predict: Predict, order: Callable[[list[Ticket], list[float], float], list[Ticket]]) -> Policy:
    """A policy from a prediction, made once for each ticket when it is first seen, and an order by it.

    order(waiting, predictions, now) -> waiting in order.
    """
    seen: dict[int, tuple[Ticket, float]] = {}

    def policy(waiting: list[Ticket], now: float) -> list[Ticket]:
        new = [t for t in waiting if t.id not in seen or seen[t.id][0] is not t]  # another trace has the same ids
        if new:
            seen.update((t.id, (t, value)) for t, value in zip(new, predict(new), strict=True))
        return order(waiting, [seen[t.id][1] for t in waiting], now)

    return policy


def shortest(predict: Predict) -> Policy:
    """Smallest prediction first, and no thought for who has waited long."""

    def order(waiting: list[Ticket], values: list[float], now: float) -> list[Ticket]:
        return [t for _, t in sorted(zip(values, waiting, strict=True), key=lambda pair: (pair[0], pair[1].id))]

    return predicted(predict, order)


def prioritised(patience: float | None = None) -> Policy:
    """Lowest priority number first; `patience` seconds of waiting are worth one level, None: no waiting helps."""

    def policy(waiting: list[Ticket], now: float) -> list[Ticket]:
        return sorted(waiting, key=lambda t: (t.priority + (t.arrival / patience if patience else 0.0), t.id))

    return policy


def similar(predict: Predict) -> Policy:
    """Merge what takes about as long as the request that waits longest: nearest in the logarithm of the prediction."""

    def order(waiting: list[Ticket], values: list[float], now: float) -> list[Ticket]:
        if not waiting:
            return []
        logs = {t.id: math.log(max(v, 1e-9)) for t, v in zip(waiting, values, strict=True)}
        oldest = min(waiting, key=lambda t: t.id)
        return sorted(waiting, key=lambda t: (abs(logs[t.id] - logs[oldest.id]), t.id))

    return predicted(predict, order)


def rank_correlation(a: list[float], b: list[float]) -> float:
    """Spearman's rho: 1 where both put everybody in the same order, 0 where the one says nothing about the other."""
    ranks = [np.argsort(np.argsort(x)).astype(float) for x in (a, b)]
    return float(np.corrcoef(ranks)[0, 1])
