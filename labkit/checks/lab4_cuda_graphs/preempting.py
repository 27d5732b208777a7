"""A whole scheduler, with a pool that runs out."""

from __future__ import annotations

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab4_cuda_graphs.stepping import LAB, job
from labkit.simulate import Blocks, Chunk, Job, NoRoom, Step, Stuck, alone, drive, make_jobs

schedule_step = Question(
    "schedule_step",
    LAB,
    "every chunk has room, victims lose theirs and keep their tokens, and the oldest always advances",
)

# (prompt, answer, arrival) of each request, blocks of 4 tokens, budget, places
TIGHT: tuple[tuple[list[tuple[int, ...]], int, int, int], ...] = (
    ([(5, 12), (6, 12), (4, 12), (7, 12)], 12, 16, 4),
    ([(3, 20), (3, 20), (3, 20)], 9, 8, 8),
    ([(9, 8), (2, 18), (13, 6, 2), (1, 15, 3), (6, 9, 5)], 8, 8, 5),
    ([(16, 3), (1, 16), (11, 9)], 6, 12, 3),
)


def watched(answer):
    """The answer, with what must hold after each of its calls looked at."""

    def schedule(running: list[Job], waiting: list[Job], blocks: Blocks, budget: int, seqs: int) -> list[Chunk]:
        before = {j.id: list(j.tokens) for j in running + waiting}
        chunks = [Chunk(*c) for c in answer(running, waiting, blocks, budget, seqs)]
        for j in running + waiting:
            require(
                before.pop(j.id, None) == j.tokens,
                f"request {j.id} lost tokens (or stands in both lists): a preempted request keeps what it has"
                " generated",
            )
        require(not before, f"requests {sorted(before)} are in neither list any more")
        for j in waiting:
            require(not j.block_table, f"request {j.id} waits and still has blocks {j.block_table}: release them")
        held = sum(len(j.block_table) for j in running)
        require(
            held + blocks.num_free == blocks.num_blocks, f"{blocks.num_blocks - held - blocks.num_free} blocks are lost"
        )
        total = sum(c.length for c in chunks)
        require(total <= budget, f"the step holds {total} tokens, the budget is {budget}")
        require(len(running) <= seqs, f"{len(running)} requests run, max_num_seqs is {seqs}")
        victims = sorted({c.request.id for c in chunks if c.request not in running})
        require(
            not victims,
            f"requests {victims} have a chunk in this step and do not run: a victim's chunk must go, or it writes"
            " into blocks of others",
        )
        return chunks

    return schedule


def driven(
    answer, sizes, num_blocks: int, budget: int, seqs: int, seed: int = 0
) -> tuple[list[Step], list[Job], Blocks]:
    """Serve requests to the end; trouble is said in one sentence."""
    jobs, blocks = make_jobs(sizes, seed), Blocks(num_blocks)
    try:
        return drive(watched(answer), jobs, blocks, budget, seqs, max_steps=400), jobs, blocks
    except NoRoom as error:
        raise Failed(f"{error}; was `grow` asked for all tokens of the chunk?") from None
    except Stuck as error:
        raise Failed(f"{error}: do two requests take blocks from one another for ever?") from None


@schedule_step.invariant("the same tokens as one request at a time, with a pool that is too small", share=2)
def _(answer) -> None:
    for seed, (sizes, num_blocks, budget, seqs) in enumerate(TIGHT):
        _, jobs, _ = driven(answer, sizes, num_blocks, budget, seqs, seed)
        for j in jobs:
            require(
                j.output == alone(j),
                f"{len(sizes)} requests on {num_blocks} blocks: request {j.id} got other tokens than alone, after"
                f" {j.preemptions} preemptions",
            )


@schedule_step.invariant("preemptions are counted, and all blocks come back")
def _(answer) -> None:
    for seed, (sizes, num_blocks, budget, seqs) in enumerate(TIGHT):
        log, jobs, blocks = driven(answer, sizes, num_blocks, budget, seqs, seed)
        seen = sum(len(step.preempted) for step in log)
        counted = sum(j.preemptions for j in jobs)
        require(seen > 0, "nobody was ever preempted, with a pool that is too small")
        require(counted == seen, f"{seen} preemptions were seen and {counted} counted")
        require(blocks.num_free == num_blocks, f"{blocks.num_free} of {num_blocks} blocks are free at the end")


@schedule_step.invariant("the last arrival is the victim, and waits in front")
def _(answer) -> None:
    for seed, (sizes, num_blocks, budget, seqs) in enumerate(TIGHT):
        log, _, _ = driven(answer, sizes, num_blocks, budget, seqs, seed)
        for number, step in enumerate(log):
            ran = sorted(step.decoding + step.prefilling)
            want = ran[len(ran) - len(step.preempted) :]
            require(
                sorted(step.preempted) == want,
                f"step {number}: {sorted(step.preempted)} of running {ran} were preempted, {want} expected",
            )
            require(
                list(step.waiting) == sorted(step.waiting),
                f"step {number}: waiting is {list(step.waiting)}: the preempted stand in front, oldest first",
            )


@schedule_step.invariant("a chunk planned for a victim is withdrawn, and its tokens are free for others")
def _(answer) -> None:
    blocks = Blocks(4)
    oldest, middle, newest = job(0, 12, 7), job(1, 8, 3), job(2, 4, 3)
    for request, tokens in ((oldest, 8), (middle, 4), (newest, 4)):
        blocks.grow(request, tokens)
    running, waiting = [oldest, middle, newest], []  # type: list[Job], list[Job]
    chunks = watched(answer)(running, waiting, blocks, 5, 4)
    got = {c.request.id: (c.start, c.length) for c in chunks}
    require(
        2 not in got and 0 in got,
        f"the plan is {got}: request 2 decodes and was planned first, then made room for request 0",
    )
    require(
        got.get(1, (0, 0))[1] == 0 or 1 in {j.id for j in running}, f"the plan is {got}, and request 1 does not run"
    )
    total = sum(length for _, length in got.values())
    require(
        total == 5,
        f"the plan is {got}, {total} tokens of a budget of 5: the token that was planned for the victim is free again",
    )


@schedule_step.invariant("a prompt is admitted when all of it fits, not its first chunk", share=2)
def _(answer) -> None:
    _, jobs, _ = driven(answer, [(8, 24), (40, 2, 2)], 12, 8, 4)
    require(
        jobs[1].preemptions == 0,
        f"request 1 was preempted {jobs[1].preemptions} times: its prompt of 40 tokens needs 10 of 12 blocks, and it"
        " was admitted when only its first chunk fitted",
    )


@schedule_step.invariant("the oldest request advances in every step, and is never preempted")
def _(answer) -> None:
    for seed, (sizes, num_blocks, budget, seqs) in enumerate(TIGHT):
        log, jobs, _ = driven(answer, sizes, num_blocks, budget, seqs, seed)
        require(jobs[0].preemptions == 0, f"request 0, the oldest, was preempted {jobs[0].preemptions} times")
        for number, step in enumerate(log):
            here = {r for r, _, _ in step.chunks}
            require(0 in here, f"step {number} holds nothing of request 0")
            if 0 in step.finished:
                break


@schedule_step.invariant("decodes first, then prompts, then who waits")
def _(answer) -> None:
    for budget, want in ((26, {1: (8, 1), 0: (8, 22), 2: (0, 3)}), (9, {1: (8, 1), 0: (8, 8)})):
        blocks = Blocks(40)
        running, waiting = [job(0, 30, 8), job(1, 9, 8)], [job(2, 5), job(3, 5)]
        for request in running:
            blocks.grow(request, 8)
        got = {c.request.id: (c.start, c.length) for c in watched(answer)(running, waiting, blocks, budget, 3)}
        require(got == want, f"the plan is {got}, {want} expected with a budget of {budget} and 3 places")


QUESTIONS = [schedule_step]
