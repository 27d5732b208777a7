"""Choosing headroom by goodput."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.checks.lab4_cuda_graphs.stepping import LAB
from labkit.simulate import Served, Ticket

fit_headroom = Question(
    "fit_headroom", LAB, "the headroom with the most requests a second within both limits is found, on the same traces"
)


def run(good: int, slow_start: int, slow_tokens: int, seconds: float, first: float = 0.0) -> list[Served]:
    """A replay of `seconds`: so many requests within limits of 1 s and 0.1 s, beyond the first, beyond the second."""
    served = []
    kinds = [(0.5, 0.05)] * good + [(1.5, 0.05)] * slow_start + [(0.5, 0.2)] * slow_tokens
    for i, (ttft, tpot) in enumerate(kinds):
        arrival = first if i == len(kinds) - 1 else first + 0.1
        began = arrival + ttft
        finished = first + seconds if i == 0 else began + 10 * tpot
        output_len = 11 if i else round((finished - began) / tpot) + 1
        served.append(Served(Ticket(i, arrival, 10, 100, output_len), arrival, began, finished))
    middle = len(served) // 2
    return served[middle:] + served[:middle]  # who came first and who is done last stand anywhere


class Plays:
    """A play function of prepared replays, which notes what it was asked for."""

    def __init__(self, runs: dict[tuple[float, int], list[Served]]):
        self.runs = runs
        self.asked: list[tuple[float, int]] = []

    def __call__(self, headroom: float, seed: int) -> list[Served]:
        self.asked.append((headroom, seed))
        return list(self.runs[headroom, seed])


def chosen(answer, table: dict[float, list[list[Served]]]) -> tuple[float, Plays]:
    """What the answer chooses of headroom -> one replay for each of the seeds 0, 1, ..."""
    plays = Plays({(h, seed): r for h, runs in table.items() for seed, r in enumerate(runs)})
    seeds = list(range(len(next(iter(table.values())))))
    return answer(list(table), seeds, plays, 1.0, 0.1), plays


@fit_headroom.invariant("only requests within both limits count", share=2)
def _(answer) -> None:
    got, _ = chosen(answer, {0.0: [run(5, 4, 0, 10)], 0.1: [run(6, 0, 0, 10)], 0.2: [run(5, 0, 9, 10)]})
    require(
        got == 0.1,
        f"headroom {got} chosen, 0.1 expected: it has 6 good requests in 10 s, the others 5 and more that broke a"
        " limit",
    )


@fit_headroom.invariant("good requests are counted for each second, from the first arrival to the last finish")
def _(answer) -> None:
    got, _ = chosen(answer, {0.0: [run(12, 0, 0, 20, first=100.0)], 0.1: [run(10, 0, 0, 10, first=3.0)]})
    require(
        got == 0.1, f"headroom {got} chosen, 0.1 expected: 10 good requests in 10 s are more a second than 12 in 20 s"
    )
    got, _ = chosen(answer, {0.0: [run(8, 0, 0, 10, first=50.0)], 0.1: [run(9, 0, 0, 16, first=0.0)]})
    require(got == 0.0, f"headroom {got} chosen, 0.0 expected: its trace begins at 50 s and lasts 10 s")
    late = Served(Ticket(99, 0.0, 10, 100, 11), 0.0, 9.0, 20.0)
    got, _ = chosen(answer, {0.0: [[*run(6, 0, 0, 10), late]], 0.1: [run(5, 0, 0, 10)]})
    require(got == 0.1, f"headroom {got} chosen, 0.1 expected: with 0.0 a request beyond the limits ends at 20 s")


@fit_headroom.invariant("a limit is still within the limit")
def _(answer) -> None:
    exact = [Served(Ticket(i, 0.0, 10, 100, 11), 0.0, 1.0, 2.0) for i in range(4)]  # ttft 1.0, tpot 0.1
    got, _ = chosen(answer, {0.0: [exact[:3]], 0.1: [exact]})
    require(got == 0.1, f"headroom {got} chosen, 0.1 expected: a request at both limits is served within them")


@fit_headroom.invariant("all candidates see all traces, once each, and the mean decides")
def _(answer) -> None:
    table = {0.0: [run(9, 0, 0, 10), run(1, 0, 0, 10)], 0.1: [run(6, 0, 0, 10), run(6, 0, 0, 10)]}
    got, plays = chosen(answer, table)
    require(
        sorted(plays.asked) == [(h, s) for h in (0.0, 0.1) for s in (0, 1)],
        f"replays asked for: {sorted(plays.asked)}; each headroom with each seed, once, was expected",
    )
    require(got == 0.1, f"headroom {got} chosen, 0.1 expected: 6 and 6 good requests beat 9 and 1 on the mean")


@fit_headroom.invariant("of equal ones the smallest")
def _(answer) -> None:
    got, _ = chosen(answer, {0.2: [run(5, 0, 0, 10)], 0.05: [run(5, 0, 0, 10)], 0.0: [run(4, 0, 0, 10)]})
    require(got == 0.05, f"headroom {got} chosen, 0.05 expected: it is as good as 0.2 and leaves less memory idle")


QUESTIONS = [fit_headroom]
