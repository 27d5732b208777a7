"""What a user waits for: latencies, goodput, and events of a stream."""

from __future__ import annotations

import json
import random

from labkit.checks.contract import Question, require
from labkit.checks.lab5_vllm_serving.cases import timelines
from labkit.serve.recording import Timeline

LAB = "lab5_vllm_serving"
SHIPPED = ("labkit.serve.client", "labkit.serve.load")

latencies = Question("latencies", LAB, "each latency is that between its own two events", SHIPPED)
goodput = Question("goodput", LAB, "a request counts if it keeps the whole objective", SHIPPED)
fixed_events = Question("fixed_events", LAB, "events are those of the server, however the network cuts them", SHIPPED)


def _close(got: object, want: float, look_at: str) -> None:
    good = isinstance(got, int | float) and abs(got - want) < 1e-9
    require(good, f"{look_at}: {got!r}, {want:.6g} expected")


@latencies.invariant("time to first token runs from sending")
def _(answer) -> None:
    for sent in (0.0, 2.5):
        got = answer(sent, (sent + 0.25, sent + 0.5))
        _close(got["ttft"], 0.25, f"ttft of a request sent at {sent} s with its first token 0.25 s later")


@latencies.invariant("inter-token latencies are gaps, one fewer than tokens")
def _(answer) -> None:
    got = answer(1.0, (1.5, 1.625, 2.125))["itl"]
    require(list(got) == [0.125, 0.5], f"itl of tokens at 1.5, 1.625 and 2.125 s is {got!r}, [0.125, 0.5] expected")
    got = answer(1.0, (1.5,))["itl"]
    require(list(got) == [], f"itl of one token is {got!r}: there is no gap")


@latencies.invariant("time per output token leaves the first token out")
def _(answer) -> None:
    _close(answer(1.0, (1.5, 1.625, 2.125))["tpot"], 0.3125, "tpot is the mean gap: three tokens have two gaps")
    _close(answer(1.0, (3.0,))["tpot"], 0.0, "tpot of a single token, which has no gap")


@latencies.invariant("end to end runs from sending to the last token")
def _(answer) -> None:
    _close(answer(1.0, (1.5, 1.625, 2.125))["e2e"], 1.125, "e2e")


@latencies.invariant("ttft and the gaps add up to the whole")
def _(answer) -> None:
    for t in timelines(seed=1):
        if t.token_times:
            got = answer(t.sent, t.token_times)
            _close(got["ttft"] + sum(got["itl"]), got["e2e"], f"request {t.id}: ttft plus all gaps")


def _good(t: Timeline, ttft: float, tpot: float) -> bool:
    if not t.token_times:
        return False
    gaps = len(t.token_times) - 1
    mean = (t.token_times[-1] - t.token_times[0]) / gaps if gaps else 0.0
    return t.token_times[0] - t.sent <= ttft and mean <= tpot


def _expected(requests: list[Timeline], ttft: float, tpot: float, seconds: float) -> float:
    return sum(_good(t, ttft, tpot) for t in requests) / seconds


EXACT = Timeline(0, 0.0, 0.0, (0.25, 0.375))


@goodput.invariant("good requests a second, of random ones", share=2)
def _(answer) -> None:
    for seed in range(3):
        requests = timelines(seed=seed)
        for ttft, tpot in ((0.08, 0.02), (0.2, 0.03)):
            got, want = answer(requests, ttft, tpot, 5.0), _expected(requests, ttft, tpot, 5.0)
            _close(got, want, f"40 requests in 5 s, ttft at most {ttft} s and tpot at most {tpot} s, both of them")


@goodput.invariant("a request without an answer is not good")
def _(answer) -> None:
    _close(
        answer([EXACT, Timeline(1, 0.0, 0.0, ())], 1.0, 1.0, 2.0), 0.5, "one answer, one request that got none, in 2 s"
    )


@goodput.invariant("the bounds themselves are kept")
def _(answer) -> None:
    _close(
        answer([EXACT], 0.25, 0.125, 1.0), 1.0, "a ttft of exactly 0.25 s and a tpot of exactly 0.125 s, both allowed"
    )


@goodput.invariant("one slow request is not outweighed by fast ones")
def _(answer) -> None:
    slow = Timeline(1, 0.0, 0.0, (9.0, 9.1))
    _close(answer([EXACT] * 3 + [slow], 0.3, 0.2, 1.0), 3.0, "three fast and one slow: each is judged by itself")
    jerky = Timeline(2, 0.0, 0.0, (0.1, 0.2, 1.2))
    _close(answer([jerky], 0.3, 0.2, 1.0), 0.0, "gaps of 0.1 and 1.0 s have a tpot of 0.55 s")


def cut(data: bytes, seed: int) -> list[bytes]:
    """A stream as a network may deliver it: in pieces of 1 to 40 bytes, or of several events at once."""
    rng, found = random.Random(seed), []
    while data:
        size = rng.choice([1, 3, 7, 40, 200])
        found.append(data[:size])
        data = data[size:]
    return found


def stream(texts: list[str]) -> bytes:
    """Server-sent events of these texts, with a comment between them, and the end mark."""
    events = [f"data: {json.dumps({'text': text}, ensure_ascii=False)}\n\n" for text in texts]
    return (events[0] + ": ping\n\n" + "".join(events[1:]) + "data: [DONE]\n\n").encode()


@fixed_events.invariant("each event once, whole, whatever the pieces, letters of several bytes included")
def _(answer) -> None:
    texts = ["The ", "北京的", "天气", " is", " fine\n", "好"]
    want = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    data = stream(texts)
    cases = {f"cut in pieces, seed {seed}": cut(data, seed) for seed in range(6)}
    cases |= {"in one piece": [data], "byte by byte": [data[i : i + 1] for i in range(len(data))]}
    for name, pieces in cases.items():
        got = list(answer(iter(pieces)))
        require(
            got == want,
            f"a stream {name}: {got[:3]!r}..., {want[:3]!r}... expected; "
            "a piece of the network is no event: keep what is incomplete until its end has come",
        )


QUESTIONS = [latencies, goodput, fixed_events]
