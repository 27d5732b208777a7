"""Plays a trace through a server in counted steps: chunked prefill beside decodes, preemption, graphs for pure decodes.

A step costs what `StepCost` says. Requests that decode all grow by one token a step, so what happens to one of them (it
needs a block, it is done) is entered beforehand under the number of its step, and a step touches only those with an
entry. Everything follows from the trace and the server: no clock, no random numbers.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from labkit.simulate.cost import LADDER, QWEN3_8B_ON_H200, StepCost
from labkit.simulate.policies import Policy, fcfs
from labkit.simulate.traffic import Served, Ticket, chat_traffic, with_state


@dataclass(frozen=True)
class Server:
    """A server. ValueError for sizes that do not go together.

    num_blocks, block_size: of the KV pool. max_num_seqs: requests that run at a time. budget: tokens a step. headroom:
    part of the pool that admission leaves free while others run. ladder: batch sizes with a graph. one_batch: admit
    nobody while somebody runs, then whole prompts at once, as servers did before continuous batching.
    """

    num_blocks: int = 3000
    block_size: int = 16
    max_num_seqs: int = 64
    budget: int = 1024
    headroom: float = 0.0
    ladder: tuple[int, ...] = LADDER
    cost: StepCost = QWEN3_8B_ON_H200
    one_batch: bool = False

    def __post_init__(self):
        if min(self.num_blocks, self.block_size, self.max_num_seqs, *self.ladder) < 1:
            raise ValueError("num_blocks, block_size, max_num_seqs and every size of the ladder must be at least 1")
        if self.budget < self.max_num_seqs:
            raise ValueError(f"budget ({self.budget}) must be at least max_num_seqs ({self.max_num_seqs})")
        if not 0 <= self.headroom < 1:
            raise ValueError(f"headroom must be in 0 .. 1, and is {self.headroom}")


DEMO_SERVER = Server(num_blocks=400, max_num_seqs=3, budget=512, ladder=(1, 2, 4))
"""A server small enough for a picture of its steps."""


class Shown(NamedTuple):
    """A step for a picture. prefill, decode: ids. padded: rows computed for nobody. graph: whether one was replayed."""

    start: float
    seconds: float
    prefill: tuple[int, ...]
    decode: tuple[int, ...]
    padded: int
    graph: bool


@dataclass
class Replay:
    """What became of a trace. served: in order of id. steps: only if recorded. recomputed: tokens computed again."""

    served: list[Served] = field(default_factory=list)
    steps: list[Shown] = field(default_factory=list)
    num_steps: int = 0
    preemptions: int = 0
    recomputed: int = 0

    @property
    def seconds(self) -> float:
        """From the first arrival to the last token."""
        return max(s.finished for s in self.served) - min(s.ticket.arrival for s in self.served)

    @property
    def throughput(self) -> float:
        """Generated tokens a second."""
        return sum(s.ticket.output_len for s in self.served) / self.seconds

    @property
    def mean(self) -> float:
        """Mean latency, seconds."""
        return float(np.mean([s.latency for s in self.served]))

    @property
    def longest_wait(self) -> float:
        """The longest that a request waited until it was first scheduled, seconds."""
        return max(s.waited for s in self.served)

    def percentile(self, q: float, of: Callable[[Served], float] = lambda s: s.latency) -> float:
        """A percentile of the latencies, or of what `of` gives for each request."""
        return float(np.percentile([of(s) for s in self.served], q))


@dataclass(eq=False)
class _Live:
    ticket: Ticket
    context: int  # tokens to be computed when it is admitted: prompt, and what it had generated
    left: int  # tokens still to generate
    blocks: int = 0
    computed: int = 0
    decodes_since: int | None = None  # step of its last prefill chunk
    started: float | None = None
    first_token: float = 0.0
    preemptions: int = 0
    admissions: int = 0


def replay(trace: list[Ticket], server: Server, policy: Policy = fcfs, record: bool = False) -> Replay:
    """Serve a trace to its end. record: keep every step for a picture.

    ValueError for a request that the pool can never hold, and for a policy that loses or invents one.
    """
    for t in trace:
        needed = -(-(t.prompt_len + t.output_len) // server.block_size)
        if needed > server.num_blocks:
            raise ValueError(f"request {t.id} needs {needed} blocks, the pool has {server.num_blocks}")
    return _Run(trace, server, policy, record).play()


def busy_hour(rate: float) -> tuple[Server, list[Served], list[Ticket]]:
    """A server of 32 places, what became of yesterday's 600 requests on it under FCFS, and today's trace of 800."""
    server = Server(max_num_seqs=32, num_blocks=2000)
    return server, replay(chat_traffic(600, rate, seed=50), server).served, chat_traffic(800, rate, seed=51)


class _Run:
    def __init__(self, trace: list[Ticket], server: Server, policy: Policy, record: bool):
        self.server, self.policy, self.record = server, policy, record
        self.coming = sorted(trace, key=lambda t: (t.arrival, t.id))[::-1]
        self.waiting: dict[int, _Live] = {}
        self.running: list[_Live] = []  # in order of admission
        self.free = server.num_blocks
        self.context = 0  # tokens of KV that the running requests hold
        self.now, self.step = 0.0, 0
        self.due: dict[int, list[tuple[_Live, int, str]]] = defaultdict(list)
        self.blocked = False  # admission failed, and nothing has changed since
        self.result = Replay()

    def play(self) -> Replay:
        while self.coming or self.waiting or self.running:
            self._arrive()
            if not (self.waiting or self.running):
                self.now = self.coming[-1].arrival
                continue
            self._one_step()
        self.result.served.sort(key=lambda s: s.ticket.id)
        self.result.num_steps = self.step
        return self.result

    def _arrive(self) -> None:
        while self.coming and self.coming[-1].arrival <= self.now:
            t = self.coming.pop()
            t = with_state(t, len(self.waiting), len(self.running))
            self.waiting[t.id] = _Live(t, t.prompt_len, t.output_len)
            self.blocked = False

    def _one_step(self) -> None:
        events = self.due.pop(self.step, [])
        preempted = [self._grow(live) for live, epoch, what in events if what == "grow" and self._is(live, epoch)]
        decoding = [r for r in self.running if r.decodes_since is not None]
        closed = self.server.one_batch and bool(self.running)
        budget = 10**9 if self.server.one_batch else self.server.budget - len(decoding)
        chunks: list[tuple[_Live, int]] = []
        for live in self.running:
            if live.decodes_since is None and budget > 0:
                chunks.append((live, min(budget, live.context - live.computed)))
                budget -= chunks[-1][1]
        if not closed and not any(preempted):
            self._admit(chunks, budget)
        self._compute(decoding, chunks)
        for live, length in chunks:
            self._advance(live, length)
        self._finish([live for live, epoch, what in events if what == "done" and self._is(live, epoch)])
        self.step += 1

    def _is(self, live: _Live, epoch: int) -> bool:
        """Whether an entry is still about this admission of the request: a preemption makes it void."""
        return live.admissions == epoch and live in self.running

    def _grow(self, live: _Live) -> bool:
        """One more block for a request that decodes, at the cost of the latest admitted. Whether it cost somebody."""
        cost_somebody = False
        while self.free == 0 and live in self.running:
            self._preempt(self.running[-1])
            cost_somebody = True
        if live in self.running:
            self.free -= 1
            live.blocks += 1
            self._enter(live, self.server.block_size, "grow")
        return cost_somebody

    def _preempt(self, live: _Live) -> None:
        self.running.remove(live)
        generated = 0 if live.decodes_since is None else self.step - live.decodes_since
        held = live.computed + max(generated - 1, 0)  # the newest token is not computed yet
        self.context -= held
        self.free += live.blocks
        self.result.recomputed += held
        self.result.preemptions += 1
        live.context += generated
        live.left -= generated
        live.blocks, live.computed, live.decodes_since = 0, 0, None
        live.preemptions += 1
        self.waiting[live.ticket.id] = live
        self.blocked = False

    def _admit(self, chunks: list[tuple[_Live, int]], budget: int) -> None:
        server = self.server
        if self.blocked or budget <= 0 or not self.waiting or len(self.running) >= server.max_num_seqs:
            return
        for ticket in self._ordered():
            live = self.waiting[ticket.id]
            blocks = -(-live.context // server.block_size)
            spare = math.ceil(server.headroom * server.num_blocks) if self.running else 0
            if blocks + spare > self.free:  # whoever comes next would overtake, and this one could wait for ever
                self.blocked = True
                return
            del self.waiting[ticket.id]
            self.running.append(live)
            self.free -= blocks
            live.blocks = blocks
            live.admissions += 1
            live.started = self.now if live.started is None else live.started
            chunks.append((live, min(budget, live.context)))
            budget -= chunks[-1][1]
            if budget <= 0 or len(self.running) >= server.max_num_seqs:
                return

    def _ordered(self) -> list[Ticket]:
        given = [live.ticket for live in self.waiting.values()]
        order = list(self.policy(list(given), self.now))
        if sorted(t.id for t in order) != sorted(t.id for t in given):
            raise ValueError("the policy must return the tickets that it was given, each once")
        return order

    def _compute(self, decoding: list[_Live], chunks: list[tuple[_Live, int]]) -> None:
        """Let the clock run for this step. Who was preempted in it is in `decoding` no more."""
        rows = len(decoding) + len(chunks)
        graph = not chunks and rows <= max(self.server.ladder)
        padded = min(size for size in self.server.ladder if size >= rows) if graph else rows
        tokens = len(decoding) + sum(length for _, length in chunks)
        self.context += tokens
        seconds = self.server.cost.seconds(tokens, padded, self.context, graph)
        if self.record:
            ids = tuple(c.ticket.id for c, _ in chunks), tuple(d.ticket.id for d in decoding)
            self.result.steps.append(Shown(self.now, seconds, *ids, padded - rows, graph))
        self.now += seconds

    def _advance(self, live: _Live, length: int) -> None:
        """A prompt chunk is computed; the last one gives a token, and from the next step on the request decodes."""
        live.computed += length
        if live.computed < live.context:
            return
        if live.first_token == 0.0:
            live.first_token = self.now
        live.decodes_since = self.step
        if live.left == 1:
            self._finish([live])
            return
        self._enter(live, live.blocks * self.server.block_size - live.context + 1, "grow")
        self._enter(live, live.left - 1, "done")

    def _enter(self, live: _Live, steps: int, what: str) -> None:
        self.due[self.step + steps].append((live, live.admissions, what))

    def _finish(self, done: list[_Live]) -> None:
        for live in done:
            assert live.started is not None and live.decodes_since is not None
            self.running.remove(live)
            self.free += live.blocks
            self.context -= live.context + self.step - live.decodes_since
            self.blocked = False
            self.result.served.append(Served(live.ticket, live.started, live.first_token, self.now, live.preemptions))
