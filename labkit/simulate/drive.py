"""Runs a scheduler step by step over the toy model, and logs what each step contained."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from labkit.simulate.jobs import Blocks, Chunk, Job, PagedModel, make_jobs

Schedule = Callable[[list[Job], list[Job], Blocks, int, int], list[Chunk]]
"""(running, waiting, blocks, budget, max_num_seqs) -> chunks. Moves requests between the lists."""


class Stuck(RuntimeError):
    """Requests are left, and they do not get done."""


@dataclass(frozen=True)
class Step:
    """One step. chunks: (id, start, length) of each. decoding, prefilling: ids of those that ran before it, by what
    they had pending. preempted, finished, waiting: ids. free: blocks that nobody owned after it."""

    chunks: tuple[tuple[int, int, int], ...]
    decoding: tuple[int, ...]
    prefilling: tuple[int, ...]
    preempted: tuple[int, ...]
    finished: tuple[int, ...]
    waiting: tuple[int, ...]
    free: int

    @property
    def tokens(self) -> int:
        """Tokens that it computed."""
        return sum(length for _, _, length in self.chunks)


def roomy(plan: Callable[[list[Job], list[Job], int, int], list[Chunk]]) -> Schedule:
    """A scheduler from a plan that knows nothing of blocks: they grow by themselves, out of a pool that is large."""

    def schedule(running: list[Job], waiting: list[Job], blocks: Blocks, budget: int, max_num_seqs: int) -> list[Chunk]:
        chunks = plan(running, waiting, budget, max_num_seqs)
        for request, start, length in map(_whole, chunks):
            blocks.grow(request, start + length)
        return chunks

    return schedule


def drive(
    schedule: Schedule, jobs: list[Job], blocks: Blocks, budget: int, max_num_seqs: int, max_steps: int = 2000
) -> list[Step]:
    """Serve `jobs` to the end, in place, and give the log.

    Each step: what has arrived waits; `schedule` chooses; the toy model computes; who has its last token computed gets
    the next; who is done leaves and returns its blocks. Stuck if requests are left and a step holds nothing, or after
    max_steps.
    """
    running: list[Job] = []
    waiting: list[Job] = []
    log: list[Step] = []
    model, coming = PagedModel(blocks), sorted(jobs, key=lambda j: j.arrival)
    for now in range(max_steps):
        while coming and coming[0].arrival <= now:
            waiting.append(coming.pop(0))
        if not (running or waiting or coming):
            return log
        before = list(running)
        decoding = tuple(j.id for j in before if j.pending == 1)
        chunks = [Chunk(*_whole(c)) for c in schedule(running, waiting, blocks, budget, max_num_seqs)]
        if not chunks and (running or waiting):
            raise Stuck(f"step {now} computes nothing, and requests {sorted(j.id for j in running + waiting)} are left")
        for chunk, token in zip(chunks, model(chunks), strict=True):
            chunk.request.num_computed = chunk.start + chunk.length
            if not chunk.request.pending:
                chunk.request.tokens.append(token)
        finished = [j for j in running if j.done]
        for job in finished:
            running.remove(job)
            blocks.release(job)
        log.append(
            Step(
                tuple((c.request.id, c.start, c.length) for c in chunks), decoding,
                tuple(j.id for j in before if j.id not in decoding), tuple(j.id for j in before if j in waiting),
                tuple(j.id for j in finished), tuple(j.id for j in waiting), blocks.num_free,
            )
        )  # fmt: skip
    raise Stuck(f"after {max_steps} steps requests {sorted(j.id for j in running + waiting)} are not done")


def _whole(chunk: Any) -> tuple[Job, int, int]:
    try:
        request, start, length = chunk
    except (TypeError, ValueError):
        raise TypeError(f"a chunk is (request, start, length), and one is {chunk!r}") from None
    return request, int(start), int(length)


def beside_prompts(plan: Callable[[list[Job], list[Job], int, int], list[Chunk]], budget: int) -> tuple[int, int]:
    """Three requests decode while four prompts of 200 tokens come, one every twelve steps.

    Gives the tokens of the longest step in which somebody decoded, and the step in which the last prompt's answer
    ended.
    """
    sizes: list[tuple[int, ...]] = [(4, 90), (4, 90), (4, 90), *[(200, 4, 5 + 12 * i) for i in range(4)]]
    log = drive(roomy(plan), make_jobs(sizes), Blocks(400), budget, 8)
    ended = max(number for number, step in enumerate(log, 1) if any(request > 2 for request in step.finished))
    return max(step.tokens for step in log if step.decoding), ended
