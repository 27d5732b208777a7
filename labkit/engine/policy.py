"""Who is served first: a policy puts requests in order, and knows nothing else of the engine."""

from __future__ import annotations

from collections.abc import Sequence as Sized
from typing import Protocol

from labkit.engine.requests import Request


class Policy(Protocol):
    """Orders requests. Running ones are ordered by it too: when blocks run out, the last of them is preempted.

    The engine makes progress as long as the order of two requests does not flip from step to step.
    """

    def order(self, waiting: list[Request]) -> list[Request]:
        """The same requests, the one to serve first in front."""
        ...


class FCFS:
    """First come, first served. A preempted request came early, so it is in front of those that never ran."""

    def order(self, waiting: list[Request]) -> list[Request]:
        """By order of arrival."""
        return sorted(waiting, key=lambda r: r.id)


class Priority:
    """Lower priority numbers first, with ageing: waiting `ageing` steps is worth one level. ValueError below 1.

    A request's rank at step `now` is priority - (now - arrival) / ageing. `now` is the same for all, so it is left
    out: linear ageing fixes the order of two requests once and for all, and nobody waits for ever behind a stream of
    urgent newcomers. ageing=None: no ageing, and such a stream does starve the others.
    """

    def __init__(self, ageing: int | None = 100):
        if ageing is not None and ageing < 1:
            raise ValueError(f"ageing must be at least 1 step, or None, and is {ageing}")
        self.ageing = ageing

    def order(self, waiting: list[Request]) -> list[Request]:
        """By aged priority; equal ones by order of arrival."""
        return sorted(waiting, key=lambda r: (self._rank(r), r.id))

    def _rank(self, request: Request) -> float:
        return request.priority + (request.arrival / self.ageing if self.ageing else 0)


def ordered(policy: Policy, requests: Sized[Request]) -> list[Request]:
    """The policy's order of `requests`. ValueError if it lost, repeated or invented one."""
    given = list(requests)
    order = list(policy.order(list(given)))
    if sorted(map(id, order)) != sorted(map(id, given)):
        raise ValueError(
            f"policy {type(policy).__name__}.order must return the requests it was given, each once: given"
            f" {sorted(r.id for r in given)}, returned {sorted(r.id for r in order)}"
        )
    return order
