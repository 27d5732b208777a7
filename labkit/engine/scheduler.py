"""What the next step computes: decodes first, then chunks of prompts, within one budget of tokens.

Every step mixes both (Sarathi-Serve, Agrawal et al., OSDI 2024): a long prompt is computed in chunks beside the
decodes, so it delays nobody's next token by more than one budget. Iteration-level scheduling: Orca (OSDI 2022).
"""

from __future__ import annotations

from dataclasses import dataclass

from labkit.engine.block_manager import BlockManager
from labkit.engine.counters import Counters
from labkit.engine.policy import Policy, ordered
from labkit.engine.requests import Request, Status


@dataclass(frozen=True)
class Chunk:
    """Tokens start .. start + length of a request, to be computed in one step."""

    request: Request
    start: int
    length: int

    @property
    def decode(self) -> bool:
        """Whether it is one token that the request generated."""
        return self.length == 1 and self.start >= self.request.prompt_len

    @property
    def samples(self) -> bool:
        """Whether the chunk reaches the request's newest token, so that the next one can be sampled."""
        return self.start + self.length == len(self.request)


class Scheduler:
    """Requests that wait and that run, and the choice of each step's chunks.

    max_num_seqs: requests that run at a time. max_num_batched_tokens: the budget of a step. watermark: the part of the
    pool that admission leaves free while others run.
    """

    def __init__(
        self, blocks: BlockManager, policy: Policy, counters: Counters, *,
        max_num_seqs: int, max_num_batched_tokens: int, watermark: float = 0.0,
    ):  # fmt: skip
        self.waiting: list[Request] = []
        self.running: list[Request] = []
        self.policy = policy
        self._blocks, self._counters = blocks, counters
        self._max_num_seqs, self._max_tokens = max_num_seqs, max_num_batched_tokens
        self._spare = int(watermark * blocks.pool.num_blocks)

    def add(self, request: Request) -> None:
        """Let a request wait."""
        self.waiting.append(request)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, one a request, decodes first; empty if there is nothing to do."""
        self.running = ordered(self.policy, self.running)
        chunks: dict[int, Chunk] = {}
        budget = self._max_tokens
        preempted = False
        for request in sorted(self.running, key=lambda r: r.pending > 1):  # stable: the policy's order within each
            length = min(request.pending, budget)
            while request.status is Status.RUNNING and length > 0:
                if self._blocks.grow(request, request.num_computed + length):
                    chunks[request.id] = Chunk(request, request.num_computed, length)
                    budget -= length
                    break
                preempted = True
                victim = self.running[-1]
                lost = chunks.pop(victim.id, None)
                budget += lost.length if lost else 0
                self._preempt(victim)
        if not preempted:
            self._admit(chunks, budget)
        return sorted(chunks.values(), key=lambda c: not c.decode)

    def retire(self, request: Request, status: Status, reason: str = "") -> None:
        """Take a request out, whatever it does, with its blocks."""
        for queue in (self.waiting, self.running):
            if request in queue:
                queue.remove(request)
        self._blocks.release(request)
        request.status, request.reason = status, reason
        while request.tokens[-1] < 0:
            request.tokens.pop()

    def _admit(self, chunks: dict[int, Chunk], budget: int) -> None:
        for request in ordered(self.policy, self.waiting):
            if len(self.running) >= self._max_num_seqs or budget <= 0:
                return
            spare = max(self._spare, sum(map(self._blocks.owed, self.running))) if self.running else 0
            length = self._blocks.admit(request, budget, spare)
            if length == 0:  # whoever comes next may fit, but would then overtake, and this one could wait for ever
                return
            self.waiting.remove(request)
            self.running.append(request)
            request.status = Status.RUNNING
            chunks[request.id] = Chunk(request, request.num_computed, length)
            budget -= length

    def _preempt(self, request: Request) -> None:
        """Back to waiting, without blocks: its tokens are computed again, as far as the prefix cache lost them."""
        self.running.remove(request)
        self._blocks.release(request)
        request.status = Status.WAITING
        request.preemptions += 1
        self._counters.preemptions += 1
        self.waiting.append(request)
