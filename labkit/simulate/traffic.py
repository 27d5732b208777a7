"""Traffic of a chat server: three kinds of requests, what is known of each when it comes, and what became of it."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from labkit import workload


@dataclass(frozen=True)
class Ticket:
    """A request as the server notes it.

    id: in order of arrival. arrival: seconds. prompt_len: tokens. max_tokens: the most its sender accepts. priority:
    lower is more urgent. waiting, running: requests that waited and ran when it came.
    output_len: tokens of its answer. A log has it; while a request waits, nobody knows it.
    """

    id: int
    arrival: float
    prompt_len: int
    max_tokens: int
    output_len: int
    priority: int = 0
    waiting: int = 0
    running: int = 0


@dataclass(frozen=True)
class Served:
    """What became of a request: when it was first scheduled, when its first and its last token came, in seconds."""

    ticket: Ticket
    started: float
    first_token: float
    finished: float
    preemptions: int = 0

    @property
    def latency(self) -> float:
        """Seconds from arrival to the last token."""
        return self.finished - self.ticket.arrival

    @property
    def waited(self) -> float:
        """Seconds from arrival until it was first scheduled."""
        return self.started - self.ticket.arrival

    @property
    def service(self) -> float:
        """Seconds from then to the last token."""
        return self.finished - self.started

    @property
    def ttft(self) -> float:
        """Time to the first token, seconds."""
        return self.first_token - self.ticket.arrival

    @property
    def tpot(self) -> float:
        """Seconds for each token after the first; 0 if there is none."""
        return (self.finished - self.first_token) / max(self.ticket.output_len - 1, 1)


# share, prompt, answer, what senders set max_tokens to (each as likely), priority
KINDS = (
    (0.5, workload.lognormal(120, 0.7), workload.lognormal(160, 0.6), (256, 512, 1024), 1),  # questions
    (0.3, workload.lognormal(1500, 0.4), workload.lognormal(70, 0.5), (256, 512), 2),  # documents to summarise
    (0.2, workload.lognormal(300, 0.6), workload.lognormal(700, 0.5), (1024, 2048), 3),  # programs to write
)


def chat_traffic(count: int, rate: float, seed: int = 0, burst: int = 1) -> list[Ticket]:
    """`count` requests, `rate` a second: half of them questions, 30 % documents, 20 % programs, in random order.

    burst: so many come at one instant. An answer is cut at max_tokens. The same seed gives the same trace, at any rate
    the same lengths. ValueError as in labkit.workload.
    """
    rng = np.random.default_rng([seed, 7])
    kinds = rng.choice(len(KINDS), count, p=[kind[0] for kind in KINDS])
    arrivals = workload.bursty_arrivals(rate, burst)(np.random.default_rng([seed, 8]), count)
    drawn = [(prompt(rng, count), output(rng, count), rng.choice(caps, count)) for _, prompt, output, caps, _ in KINDS]
    tickets = []
    for i, kind in enumerate(kinds):
        prompt, output, cap = (int(column[i]) for column in drawn[kind])
        tickets.append(Ticket(i, float(arrivals[i]), prompt, cap, min(output, cap), KINDS[kind][4]))
    return tickets


# Twelve requests of a moment, the long ones in front, for a picture: (seconds, prompt, max_tokens, answer, priority).
_DEMO = (
    (0.00, 200, 2048, 44, 3), (0.00, 900, 1024, 40, 3), (0.00, 300, 1024, 30, 3), (0.00, 60, 256, 8, 1),
    (0.01, 90, 256, 12, 1), (0.02, 40, 256, 5, 1), (0.03, 1200, 256, 7, 2), (0.05, 70, 512, 10, 1),
    (0.10, 400, 2048, 36, 3), (0.14, 30, 256, 4, 1), (0.18, 50, 512, 9, 1), (0.24, 80, 256, 6, 1),
)  # fmt: skip
DEMO = [Ticket(i, at, prompt, cap, answer, priority) for i, (at, prompt, cap, answer, priority) in enumerate(_DEMO)]


def with_state(ticket: Ticket, waiting: int, running: int) -> Ticket:
    """The ticket with the state of the queue in which it arrived."""
    return replace(ticket, waiting=waiting, running=running)
