"""An open-loop load, what came of it, and how many of its requests were good enough.

Open loop: requests are sent when the trace says, whether or not earlier ones were answered, as users do. A loop that
waits for answers slows down with the server and so hides its queue ("coordinated omission").
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from labkit.serve.client import Client, Prompt, Record, payload_of
from labkit.serve.values import is_number, is_whole
from labkit.workload import Request

LATENCIES = ("ttft", "itl", "tpot", "e2e")


@dataclass(frozen=True)
class SLO:
    """A service level objective, in seconds; None asks for nothing. A request is good if it keeps all of it."""

    ttft: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    def __post_init__(self) -> None:
        for f in fields(self):
            bound = getattr(self, f.name)
            if bound is not None and not (is_number(bound) and bound > 0):
                raise ValueError(f"{f.name} must be more than 0 seconds, and is {bound!r}")

    def kept_by(self, record: Record) -> bool:
        """Whether a request keeps it; one that failed does not."""
        return record.ok and all(
            bound is None or getattr(record, f.name) <= bound for f in fields(self) for bound in [getattr(self, f.name)]
        )


@dataclass(frozen=True)
class Run:
    """The records of a load, in order of arrival, and the seconds from its start to its last token."""

    records: tuple[Record, ...]
    seconds: float

    def latencies(self, name: str) -> list[float]:
        """All values of "ttft", "itl", "tpot" or "e2e", in seconds.

        itl has one for each gap between tokens; tpot leaves out answers of one token.
        """
        answered = [r for r in self.records if r.ok]
        if name == "itl":
            return [gap for r in answered for gap in r.itls]
        if name not in LATENCIES:
            raise ValueError(f"name must be one of {', '.join(LATENCIES)}, and is {name!r}")
        return [getattr(r, name) for r in answered if name != "tpot" or len(r.token_times) > 1]

    def summary(self, percentiles: Sequence[float] = (50, 90, 99)) -> dict[str, float]:
        """Counts, rates a second, and latencies in seconds: "ttft_mean", "ttft_p99" and so on, NaN where none came.

        ValueError for percentiles that are no numbers from 0 to 100.
        """
        if not isinstance(percentiles, Sequence) or not all(is_number(p) and 0 <= p <= 100 for p in percentiles):
            raise ValueError(f"percentiles must be numbers from 0 to 100, and are {percentiles!r}")
        answered = [r for r in self.records if r.ok]
        tokens = sum(len(r.token_times) for r in answered)
        found = {
            "requests": float(len(self.records)),
            "failed": float(len(self.records) - len(answered)),
            "seconds": self.seconds,
            "requests_per_s": self._rate(len(answered)),
            "output_tokens_per_s": self._rate(tokens),
        }
        for name in LATENCIES:
            values = self.latencies(name) or [float("nan")]
            found[f"{name}_mean"] = float(np.mean(values))
            for p in percentiles:
                found[f"{name}_p{p:g}"] = float(np.percentile(values, p))
        return found

    def good(self, slo: SLO) -> list[bool]:
        """For each request, whether it keeps the objective."""
        if not isinstance(slo, SLO):
            raise ValueError(f"slo must be a labkit.serve.SLO, and is {slo!r}")
        return [slo.kept_by(r) for r in self.records]

    def goodput(self, slo: SLO) -> float:
        """Requests a second that keep the objective; NaN if no time passed."""
        return self._rate(sum(self.good(slo)))

    def _rate(self, count: int) -> float:
        return count / self.seconds if self.seconds > 0 else float("nan")


def run_load(
    client: Client,
    requests: Sequence[Request],
    prompts: Sequence[Prompt] | None = None,
    *,
    max_concurrency: int | None = None,
    vocab_size: int = 2048,
    seed: int = 0,
    show: bool = True,
    **options: Any,
) -> Run:
    """Send a trace as completions, each at its arrival, and record the answers; takes as long as the trace and a bit.

    requests: in any order; the records are in order of arrival. prompts: one for each request; None draws random token
    ids below `vocab_size`, prompt_len of each. Answers have exactly output_len tokens, since the end token is ignored.
    max_concurrency: requests under way at once; what arrives above that waits here, and its wait is in no latency (as
    in vLLM's benchmark), so leave it out to measure a server. options: further fields of each request's body.
    ValueError before anything is sent if something cannot be.
    """
    if max_concurrency is not None and not is_whole(max_concurrency):
        raise ValueError(f"max_concurrency must be a whole number of at least 1, or None, and is {max_concurrency!r}")
    bodies = _bodies(requests, prompts if prompts is not None else random_prompts(requests, vocab_size, seed), options)
    slots = threading.BoundedSemaphore(max_concurrency or len(requests))
    records: list[Record | None] = [None] * len(requests)
    interrupted = threading.Event()
    if show:
        print(f"{len(requests)} requests over {max(r.arrival for r in requests):.1f} s", end=" ", flush=True)
    began = time.perf_counter()

    def send(place: int, request: Request, body: dict[str, Any]) -> None:
        with slots:
            if not interrupted.is_set():
                records[place] = client.record(
                    "/v1/completions", body, number=request.id, arrival=request.arrival, began=began
                )

    threads = []
    try:
        for place, (request, body) in enumerate(sorted(bodies, key=lambda pair: pair[0].arrival)):
            time.sleep(max(0.0, began + request.arrival - time.perf_counter()))
            threads.append(threading.Thread(target=send, args=(place, request, body), daemon=True))
            threads[-1].start()
        for thread in threads:
            thread.join()
    except BaseException:
        interrupted.set()  # what waits for a slot is not sent any more
        raise
    found = [r for r in records if r is not None]
    if show:
        failed = [r.error or "no token came" for r in found if not r.ok]
        said = f"{len(found) - len(failed)} answered, the others not ({failed[0]})," if failed else "all answered"
        print(f"> {said} after {time.perf_counter() - began:.1f} s")
    last = max((r.token_times[-1] for r in found if r.ok), default=time.perf_counter() - began)
    return Run(tuple(found), last)


def _bodies(
    requests: Sequence[Request], prompts: Sequence[Prompt], options: dict[str, Any]
) -> list[tuple[Request, dict[str, Any]]]:
    """Each request and the body that is sent for it, all of them checked."""
    if not requests:
        raise ValueError("requests: there is nothing to send")
    if isinstance(prompts, str) or not hasattr(prompts, "__len__") or len(prompts) != len(requests):
        raise ValueError(f"prompts must be a list of {len(requests)}, one for each request, and is {str(prompts)[:80]}")
    found = []
    for place, (request, prompt) in enumerate(zip(requests, prompts, strict=True)):
        if not (is_number(request.arrival) and 0 <= request.arrival < float("inf")):
            raise ValueError(f"requests: an arrival must be 0 seconds or later, and number {place} has {request}")
        try:
            body = Client.completion(prompt, request.output_len, **{"ignore_eos": True, **options})
            payload_of(body)
        except ValueError as error:
            raise ValueError(f"prompts, of request number {place}: {error}") from None
        found.append((request, body))
    return found


def random_prompts(requests: Sequence[Request], vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Random token ids from 3 on (the first are special) for each request: no two share a prefix, so no cache helps."""
    if not is_whole(vocab_size, 4):
        raise ValueError(f"vocab_size must be a whole number of at least 4, and is {vocab_size!r}")
    random = np.random.default_rng(seed)
    return [random.integers(3, vocab_size, r.prompt_len).tolist() for r in requests]


def save_run(run: Run, path: Path | str) -> None:
    """Write a run as JSON."""
    text = json.dumps({"seconds": run.seconds, "records": [asdict(r) for r in run.records]})
    Path(path).write_text(text, encoding="utf-8")


def read_run(path: Path | str) -> Run:
    """A run that `save_run` wrote."""
    found = json.loads(Path(path).read_text(encoding="utf-8"))
    records = [_record(fields) for fields in found["records"]]
    return Run(tuple(records), found["seconds"])


def _record(found: dict[str, Any]) -> Record:
    """A record from JSON, which knows lists only."""
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in found.items()}
    return Record(**values)
