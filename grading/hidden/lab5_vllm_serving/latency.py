"""Hidden checks of lab 5: latencies, goodput, streams."""

from __future__ import annotations

import itertools
import json
import random

from grading.blackbox import Remote, hidden_check, require
from labkit.checks.lab5_vllm_serving.cases import timelines
from labkit.checks.lab5_vllm_serving.latency import cut, stream

LAB = "lab5_vllm_serving"


@hidden_check(LAB, "latencies")
def unseen_times(remote: Remote) -> None:
    for t in timelines(12, seed=41):
        if not t.token_times:
            continue
        got, times = remote.call("latencies", t.sent, list(t.token_times)), t.token_times
        gaps = [b - a for a, b in itertools.pairwise(times)]
        want = {
            "ttft": times[0] - t.sent, "tpot": sum(gaps) / len(gaps) if gaps else 0.0, "e2e": times[-1] - t.sent,
        }  # fmt: skip
        for name, value in want.items():
            require(abs(got[name] - value) < 1e-9, f"{name} of {len(times)} tokens is {got[name]!r}, {value} expected")
        require(len(got["itl"]) == len(gaps), f"{len(got['itl'])} latencies between {len(times)} tokens")


def goodput_of(rows: list, ttft: float, tpot: float, seconds: float) -> float:
    """Driver: the answer on timelines that are made there."""
    from labkit.serve import Timeline

    return float(goodput([Timeline(i, 0.0, sent, tuple(times)) for i, sent, times in rows], ttft, tpot, seconds))


@hidden_check(LAB, "goodput")
def unseen_loads(remote: Remote) -> None:
    for seed in (42, 43):
        load = timelines(30, seed=seed)
        rows = [[t.id, t.sent, list(t.token_times)] for t in load]
        for ttft, tpot in ((0.05, 0.025), (10.0, 0.02), (0.1, 10.0)):
            good = 0
            for t in load:
                gaps = max(len(t.token_times) - 1, 1)
                if t.token_times and t.token_times[0] - t.sent <= ttft:
                    good += (t.token_times[-1] - t.token_times[0]) / gaps <= tpot
            got = remote.call(goodput_of, rows, ttft, tpot, 7.0)
            require(abs(got - good / 7) < 1e-9, f"goodput at {ttft} s and {tpot} s is {got!r}, {good / 7} expected")


def events_of(pieces: list) -> list:
    """Driver: what the answer makes of a stream that comes in these pieces, as hexadecimal digits."""
    return list(fixed_events(bytes.fromhex(piece) for piece in pieces))


@hidden_check(LAB, "fixed_events")
def unseen_streams(remote: Remote) -> None:
    rng = random.Random(44)
    for seed in range(5):
        texts = ["".join(rng.choices("ab 书馆\n{}:d", k=rng.randint(0, 12))) for _ in range(20)]
        got = remote.call(events_of, [piece.hex() for piece in cut(stream(texts), 100 + seed)])
        want = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
        require(got == want, f"a stream of 20 events in random pieces came out as {len(got)}, or with other data")
