"""Hidden checks of lab 4: headroom, predicted latency, ageing.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import math
import random

import numpy as np

from grading.blackbox import Remote, hidden_check, require
from labkit.simulate import Server, chat_traffic, replay

LAB = "lab4_cuda_graphs"


def fit(candidates: list, seeds: list, rows: dict, limits: list) -> list:
    """Driver: fit_headroom on prepared replays, rows of (arrival, started, first token, last token, tokens)."""
    from labkit.simulate import Served, Ticket

    asked = []

    def play(headroom, seed):
        asked.append([headroom, seed])
        return [
            Served(Ticket(i, arrival, 5, 999, tokens), started, first, last)
            for i, (arrival, started, first, last, tokens) in enumerate(rows[f"{headroom} {seed}"])
        ]

    return [fit_headroom(candidates, seeds, play, *limits), sorted(asked)]


@hidden_check(LAB, "fit_headroom")
def random_replays(remote: Remote) -> None:
    rng = random.Random(61)
    for _ in range(10):
        candidates, seeds = rng.sample([0.0, 0.01, 0.03, 0.1, 0.2, 0.4], 4), [5, 8, 9]
        rows, goodput = {}, dict.fromkeys(candidates, 0.0)
        for c in candidates:
            for seed in seeds:
                run = []
                for _ in range(rng.randint(4, 12)):
                    arrival = rng.uniform(50, 60)
                    first = arrival + rng.uniform(0.2, 2)
                    tokens = rng.randint(1, 20)
                    run.append([arrival, arrival, first, first + (tokens - 1) * rng.uniform(0.01, 0.1), tokens])
                good = sum(
                    first - arrival <= 1.2 and (last - first) / max(tokens - 1, 1) <= 0.06
                    for arrival, _, first, last, tokens in run
                )
                goodput[c] += good / (max(r[3] for r in run) - min(r[0] for r in run))
                rows[f"{c} {seed}"] = run
        got, asked = remote.call(fit, candidates, seeds, rows, [1.2, 0.06])
        want = min(candidates, key=lambda c: (-goodput[c], c))
        require(got == want, f"headroom {got} of {goodput}, {want} expected")
        require(asked == sorted([c, s] for c in candidates for s in seeds), f"replays asked for: {asked}")


@hidden_check(LAB, "fit_headroom")
def ties(remote: Remote) -> None:
    run = [[0.0, 0.0, 0.5, 1.5, 11], [1.0, 1.0, 1.5, 2.5, 11]]
    rows = {f"{c} {s}": run for c in (0.3, 0.1, 0.2) for s in (1, 2)}
    got, _ = remote.call(fit, [0.3, 0.1, 0.2], [1, 2], rows, [1.0, 0.5])
    require(got == 0.1, f"three equal headrooms gave {got}, 0.1 expected")


def predictions(seed: int, day: int, other: int, rate: float, lengths: list) -> list:
    """Driver: a predictor trained on one day and asked about another: its tickets, disguised ones, one alone."""
    import dataclasses

    from labkit import simulate

    def served(number):
        return simulate.replay(simulate.chat_traffic(500, rate, number), server).served

    server = simulate.Server(max_num_seqs=32, num_blocks=2000)
    predictor = LatencyPredictor(seed=seed)
    predictor.fit(served(day))
    tickets = [s.ticket for s in served(other)]
    disguised = [dataclasses.replace(t, output_len=n) for t, n in zip(tickets, lengths, strict=True)]
    return [predictor.predict(tickets), predictor.predict(disguised), predictor.predict(tickets[7:8])]


def judged(remote: Remote, seed: int, day: int, other: int, rate: float) -> tuple[list[float], list[float]]:
    """Predicted and true seconds of a day, if nothing leaks."""
    lengths = np.random.default_rng(other).integers(1, 3000, 500).tolist()
    got, disguised, single = remote.call(predictions, seed, day, other, rate, lengths)
    require(got == disguised, "predictions change with output_len")
    require(math.isclose(got[7], single[0], rel_tol=1e-3), f"ticket 7 gets {got[7]} among others, {single[0]} alone")
    truth = replay(chat_traffic(500, rate, other), Server(max_num_seqs=32, num_blocks=2000)).served
    require(all(math.isfinite(p) and p > 0 for p in got), "a prediction is no positive number")
    return got, [s.service for s in truth]


@hidden_check(LAB, "latency_predictor")
def another_day(remote: Remote) -> None:
    got, truth = judged(remote, 1, 71, 72, 22)
    rho = float(np.corrcoef([np.argsort(np.argsort(x)) for x in (got, truth)])[0, 1])
    require(rho >= 0.56, f"rank correlation {rho:.2f} on an unseen day, 0.56 expected")


@hidden_check(LAB, "latency_predictor")
def another_load(remote: Remote) -> None:
    got, truth = judged(remote, 2, 73, 74, 18)
    typical = float(np.median(np.array(got) / np.array(truth)))
    require(1 / 1.6 < typical < 1.6, f"a prediction is typically {typical:.2f} times the truth")


def ordered(arrivals: list, ids: list, values: list, now: float, patience: float) -> list:
    """Driver: aged_order on tickets of which only id and arrival matter; a patience of 0 stands for an endless one."""
    from labkit.simulate import Ticket

    tickets = [Ticket(i, a, 5, 9, 7) for i, a in zip(ids, arrivals, strict=True)]
    kept = list(tickets)
    got = aged_order(tickets, values, now, patience or float("inf"))
    return [[t.id for t in got], tickets == kept]


@hidden_check(LAB, "aged_order")
def random_orders(remote: Remote) -> None:
    rng = random.Random(62)
    for trial in range(20):
        n = rng.randint(0, 9)
        arrivals = [float(rng.randint(0, 30)) for _ in range(n)]
        values = [rng.randint(1, 60) / 4 for _ in range(n)]
        ids, patience, now = rng.sample(range(50), n), (0.0, 0.5, 2.0, 8.0)[trial % 4], 30.0 + trial
        got, kept = remote.call(ordered, arrivals, ids, values, now, patience)
        rows = [
            (v - ((now - a) / patience if patience else 0.0), a, i)
            for v, a, i in zip(values, arrivals, ids, strict=True)
        ]
        want = [i for _, _, i in sorted(rows)]
        require(got == want, f"predictions {values}, arrivals {arrivals}, patience {patience}: {got}, {want} expected")
        require(kept, "`waiting` was changed")
