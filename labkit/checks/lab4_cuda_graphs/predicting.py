"""Predicting how long a request takes, and serving the shortest first without forgetting anybody."""

from __future__ import annotations

import functools
import math
from dataclasses import replace

import numpy as np
import torch

from labkit.checks.contract import Question, require
from labkit.checks.lab4_cuda_graphs.stepping import LAB
from labkit.simulate import Served, Server, StepCost, Ticket, chat_traffic, known, predicted, rank_correlation, replay

latency_predictor = Question(
    "latency_predictor", LAB, "seconds are predicted from what is known beforehand, and from nothing else"
)

BUSY = Server(max_num_seqs=32, num_blocks=2000)


@functools.cache
def day(seed: int, rate: float = 22, count: int = 500) -> list[Served]:
    """What became of a day's requests, first come, first served."""
    return replay(chat_traffic(count, rate, seed), BUSY).served


@functools.lru_cache(maxsize=2)
def fitted(answer):
    """A predictor trained on day 21, for all checks."""
    predictor = answer(seed=0)
    predictor.fit(day(21))
    return predictor


def disguised(tickets: list[Ticket]) -> list[Ticket]:
    """The same tickets, with answers of other lengths."""
    lengths = np.random.default_rng(4).integers(1, 2000, len(tickets))
    return [replace(t, output_len=int(n)) for t, n in zip(tickets, lengths, strict=True)]


def seconds(predictor, tickets: list[Ticket]) -> list[float]:
    """The predictions, one for each ticket, or Failed."""
    got = predictor.predict(list(tickets))
    want = f"a list of {len(tickets)} floats was expected for {len(tickets)} tickets"
    require(isinstance(got, list), f"predict gave {type(got).__name__}, {want}")
    others = sorted({type(s).__name__ for s in got} - {"float", "float64"})
    require(
        len(got) == len(tickets) and not others, f"predict gave a list of {len(got)} {' and '.join(others)}, {want}"
    )
    bad = [s for s in got if not (math.isfinite(s) and s > 0)]
    alone = ", asked about one ticket alone" if len(tickets) == 1 else ""
    require(not bad, f"predictions must be positive seconds, and one is {bad[0] if bad else 0}{alone}")
    return got


@latency_predictor.invariant("each ticket gets one positive number of seconds", stops=True)
def _(answer) -> None:
    seconds(fitted(answer), [s.ticket for s in day(22)][:200])


@latency_predictor.invariant("the length of the answer is not known, and not looked at", share=3, stops=True)
def _(answer) -> None:
    tickets = [s.ticket for s in day(22)][:200]
    same = torch.equal(fitted(answer).features(tickets), fitted(answer).features(disguised(tickets)))
    plain, other = seconds(fitted(answer), tickets), seconds(fitted(answer), disguised(tickets))
    require(
        same and plain == other,
        "predictions change with output_len, which nobody knows while a request waits: this is leakage",
    )


@latency_predictor.invariant("two linear layers, 16 hidden units, something not linear between them")
def _(answer) -> None:
    model = fitted(answer).model
    require(
        isinstance(model, torch.nn.Sequential), f"model is {type(model).__name__}, torch.nn.Sequential was expected"
    )
    linear = [layer for layer in model if isinstance(layer, torch.nn.Linear)]
    width = fitted(answer).features([day(21)[0].ticket]).shape[1]
    sizes = [(layer.in_features, layer.out_features) for layer in linear]
    require(sizes == [(width, 16), (16, 1)], f"the linear layers are {sizes}, [({width}, 16), (16, 1)] was expected")
    hidden = torch.nn.Sequential(*list(model)[list(model).index(linear[0]) + 1 : list(model).index(linear[1])])
    x = torch.linspace(-3, 3, 16)[None]
    with torch.no_grad():
        at_zero, at_x = hidden(torch.zeros_like(x)), hidden(x)
        bent = torch.cat([at_x + hidden(-x) - 2 * at_zero, hidden(2 * x) - 2 * at_x + at_zero])
    require(bool(bent.abs().max() > 1e-3), "between the two layers everything is linear, so they are one layer")


@latency_predictor.invariant("on another day it orders requests better than any of their numbers does", share=3)
def _(answer) -> None:
    log = day(22)
    tickets, truth = [s.ticket for s in log], [s.service for s in log]
    single = max(
        abs(rank_correlation([float(getattr(t, name)) for t in tickets], truth))
        for name in ("prompt_len", "max_tokens", "waiting", "running", "arrival")
    )
    got = rank_correlation(seconds(fitted(answer), tickets), truth)
    require(
        got >= single + 0.1,
        f"rank correlation with the seconds of service is {got:.2f}, one number alone gives {single:.2f}: are"
        " features and seconds on a scale that a network can learn on (logarithms, mean 0, spread 1), and are"
        " prompt_len and max_tokens among them?",
    )


@latency_predictor.invariant("predictions are seconds")
def _(answer) -> None:
    log = day(22)
    got = seconds(fitted(answer), [s.ticket for s in log])
    typical = float(np.median([p / s.service for p, s in zip(got, log, strict=True)]))
    require(
        1 / 1.6 < typical < 1.6,
        f"a prediction is typically {typical:.2f} times the seconds of service: was the logarithm undone?",
    )


@latency_predictor.invariant("a prediction does not depend on who else is asked about")
def _(answer) -> None:
    tickets = [s.ticket for s in day(22)][:40]
    together = seconds(fitted(answer), tickets)
    single = [seconds(fitted(answer), [t])[0] for t in tickets[:5]]
    require(
        bool(np.allclose(together[:5], single, rtol=1e-4)),
        f"ticket 0 gets {together[0]:.3f} s among 40 and {single[0]:.3f} s alone: use the mean and spread of training",
    )


@latency_predictor.invariant("the same seed and the same log give the same predictor")
def _(answer) -> None:
    tickets = [s.ticket for s in day(22)][:20]
    short = day(21)[:120]
    results = []
    for _ in range(2):
        predictor = answer(seed=3)
        torch.rand(7)  # whatever else drew random numbers in between
        predictor.fit(short)
        results.append(seconds(predictor, tickets))
    require(results[0] == results[1], "two predictors of seed 3 differ: where do the first weights come from?")


aged_order = Question(
    "aged_order", LAB, "the shortest goes first, and waiting earns its place", refused=("labkit.simulate.prioritised",)
)


def ticket(number: int, arrival: float) -> Ticket:
    """A ticket of which only the arrival matters."""
    return Ticket(number, arrival, 10, 100, 50)


def order(answer, tickets: list[Ticket], values: list[float], now: float, patience: float) -> list[int]:
    """Ids in the answer's order, with lost and repeated ones refused."""
    given = list(tickets)
    got = list(answer(given, list(values), now, patience))
    require(given == tickets, "`waiting` was changed: return a new list")
    ids = [t.id for t in got]
    require(sorted(ids) == sorted(t.id for t in tickets), f"{ids} came back for {sorted(t.id for t in tickets)}")
    return ids


@aged_order.invariant("the shortest goes first among those who came together")
def _(answer) -> None:
    got = order(answer, [ticket(i, 5.0) for i in range(4)], [3.0, 0.5, 7.0, 1.0], 6.0, 2.0)
    require(got == [1, 3, 0, 2], f"predictions 3, 0.5, 7, 1 are served in the order {got}, [1, 3, 0, 2] expected")


@aged_order.invariant("waiting is worth 1 / patience seconds a second", share=2)
def _(answer) -> None:
    tickets, values = [ticket(0, 0.0), ticket(1, 20.0)], [12.0, 2.0]
    for now, patience, want in ((20.0, 1.0, [0, 1]), (20.0, 1.9, [0, 1]), (20.0, 2.1, [1, 0]), (90.0, 4.0, [1, 0])):
        got = order(answer, tickets, values, now, patience)
        require(
            got == want,
            f"predictions 12 and 2 s, arrivals 0 and 20, patience {patience}: order {got}, {want} expected: the first"
            f" has earned {20 / patience:.1f} s more by waiting",
        )


@aged_order.invariant("with endless patience waiting earns nothing")
def _(answer) -> None:
    got = order(answer, [ticket(0, 0.0), ticket(1, 900.0)], [2.0, 1.9], 1000.0, math.inf)
    require(got == [1, 0], f"patience inf, predictions 2.0 and 1.9: order {got}, [1, 0] expected")


@aged_order.invariant("equal ones are served in order of arrival, then id")
def _(answer) -> None:
    tickets = [ticket(5, 2.0), ticket(3, 2.0), ticket(4, 1.0)]
    got = order(answer, tickets, [1.0, 1.0, 1.0], 2.0, math.inf)
    require(got == [4, 3, 5], f"equal predictions, arrivals 2, 2, 1 of ids 5, 3, 4: {got}, [4, 3, 5] expected")


# Half a second a request and one place: three requests a second are more than it can serve.
SLOW = Server(max_num_seqs=1, num_blocks=200, budget=64, cost=StepCost(0, 0, 0, 1, 1, 0.05, 0.05, 0, 0, 0))


@aged_order.invariant("nobody starves behind a stream of short requests", share=2)
def _(answer) -> None:
    short = [Ticket(i, i / 3, 10, 16, 10) for i in range(1, 121)]
    trace = [Ticket(0, 0.4, 10, 64, 40), *short]
    policy = predicted(known, lambda w, s, now: answer(w, [x / 20 for x in s], now, 2.0))
    waited = replay(trace, SLOW, policy).served[0].waited
    require(
        waited < 16,
        f"a request of 2 s waited {waited:.0f} s behind short ones that keep coming, at patience 2 s it waits less"
        " than 16: it starves",
    )


@aged_order.invariant("under load the mean falls well below that of first come, first served, and throughput stays")
def _(answer) -> None:
    trace = chat_traffic(500, 24, seed=23)
    before = replay(trace, BUSY)
    now = replay(trace, BUSY, predicted(lambda ts: [x / 80 for x in known(ts)], lambda w, s, t: answer(w, s, t, 8.0)))
    require(
        now.mean < 0.8 * before.mean and now.throughput > 0.95 * before.throughput,
        f"mean latency {now.mean:.2f} s and {now.throughput:.0f} tokens/s, first come, first served {before.mean:.2f}"
        f" s and {before.throughput:.0f}: less than 0.8 of the mean at 0.95 of the throughput was expected",
    )


QUESTIONS = [latency_predictor, aged_order]
