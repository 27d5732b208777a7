"""What a user waits for: latencies, goodput, and events of a stream."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

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


@latencies.invariant("time per output token leaves the first token out")
def _(answer) -> None:
    _close(answer(1.0, (1.5, 1.625, 2.125))["tpot"], 0.3125, "tpot is the mean gap: three tokens have two gaps")


@latencies.invariant("an answer of one token has no gap")
def _(answer) -> None:
    got = answer(1.0, (3.0,))
    _close(got["tpot"], 0.0, "tpot of a single token, which has no gap")
    require(list(got["itl"]) == [], f"itl of one token is {got['itl']!r}: there is no gap")
    _close(got["ttft"], 2.0, "ttft of a single token")
    _close(got["e2e"], 2.0, "e2e of a single token")


@latencies.invariant("end to end runs from sending to the last token")
def _(answer) -> None:
    _close(answer(1.0, (1.5, 1.625, 2.125))["e2e"], 1.125, "e2e")


@latencies.invariant("ttft and the gaps add up to the whole")
def _(answer) -> None:
    for t in timelines(seed=1):
        if len(t.token_times) > 1:
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
    _close(answer([jerky], 0.3, 0.2, 1.0), 0.0, "gaps of 0.1 and 1.0 s have a tpot of 0.55 s, and 0.2 s are allowed")
    _close(answer([jerky], 0.3, 0.6, 1.0), 1.0, "gaps of 0.1 and 1.0 s have a tpot of 0.55 s, and 0.6 s are allowed")


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


def _events(answer, name: str, pieces: list[bytes], want: list[str]) -> None:
    got = list(answer(iter(pieces)))
    wrong = [type(event).__name__ for event in got if not isinstance(event, str)]
    require(not wrong, f"a stream {name}: an event is of type {wrong[:1]}; its data is the text after 'data: '")
    at = next(
        (i for i, pair in enumerate(zip(got, want, strict=False)) if pair[0] != pair[1]), min(len(got), len(want))
    )
    first = [repr(events[at]) if at < len(events) else "none" for events in (got, want)]
    require(
        got == want, f"a stream {name}: event {at} is {first[0]}, {first[1]} expected; {_what_to_see(got, want, at)}"
    )


def _what_to_see(got: list[str], want: list[str], at: int) -> str:
    """What event `at`, the first wrong one, most likely comes from."""
    if at < len(got) and (got[at].startswith(":") or "[DONE]" in got[at]):
        return "comments and the end mark are no events"
    return (
        "a piece of the network is no event: keep what is incomplete until its end has come, and see what came with it"
    )


@fixed_events.invariant("each event once, whole, whatever the pieces, letters of several bytes included", share=3)
def _(answer) -> None:
    texts = ["The ", "北京的", "天气", " is", " fine\n", "好"]
    want = [json.dumps({"text": t}, ensure_ascii=False) for t in texts]
    data = stream(texts)
    _events(answer, "in one piece", [data], want)
    _events(answer, "byte by byte", [data[i : i + 1] for i in range(len(data))], want)
    for seed in range(6):
        _events(answer, f"cut in pieces, seed {seed}", cut(data, seed), want)


@fixed_events.invariant("an event is given when its end has come, not when the stream has ended")
def _(answer) -> None:
    taken = 0

    def pieces() -> Iterator[bytes]:
        nonlocal taken
        for text in ("a", "b", "c"):
            taken += 1
            yield f"data: {text}\n\n".encode()

    first = next(iter(answer(pieces())), None)
    require(first == "a", f"the first event of three is {first!r}, 'a' expected")
    require(
        taken == 1,
        f"the first event is given when {taken} pieces have come, and its end was in the first: every TTFT measured "
        "with this would be the time of the whole answer; `yield` it, do not collect",
    )


QUESTIONS = [latencies, goodput, fixed_events]
