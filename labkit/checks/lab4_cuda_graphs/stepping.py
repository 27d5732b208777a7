"""One step of continuous batching, and the plan of a step within a budget of tokens."""

from __future__ import annotations

import random

from labkit.checks.contract import Failed, Question, require
from labkit.simulate import Blocks, Job, NoRoom, PagedModel, Step, Stuck, alone, drive, make_jobs, roomy

LAB = "lab4_cuda_graphs"

serve_step = Question(
    "serve_step",
    LAB,
    "a step serves everybody who runs, lets go of who is done, and gives the same tokens as one at a time",
)

MIXED: list[tuple[int, ...]] = [(3, 2), (5, 7), (1, 1), (9, 4), (2, 12), (4, 3), (7, 1), (1, 6)]


class Served:
    """A run of an answer to its end, with what was seen after each step."""

    def __init__(self, answer, jobs: list[Job], max_num_seqs: int, num_blocks: int = 64, block_size: int = 4):
        self.jobs, self.blocks = jobs, Blocks(num_blocks, block_size)
        self.model = PagedModel(self.blocks)
        self.waiting, self.running = list(jobs), []  # type: list[Job], list[Job]
        self.after: list[list[int]] = []  # ids that run after each step
        while self.waiting or self.running:
            finished = answer(self.waiting, self.running, self.blocks, self.model, max_num_seqs)
            self.after.append([j.id for j in self.running])
            self._look(finished, max_num_seqs)

    def _look(self, finished: object, max_num_seqs: int) -> None:
        step = len(self.after)
        require(
            isinstance(finished, list), f"step {step} returned {finished!r}, a list of the requests done was expected"
        )
        require(step <= 300, f"after {step} steps requests {[j.id for j in self.waiting + self.running]} are not done")
        require(
            bool(self.running or finished),
            f"step {step}: nobody runs and nobody was done, and {len(self.waiting)} wait",
        )
        require(
            len(self.model.calls) == step,
            f"step {step}: the model was called {len(self.model.calls) - step + 1} times in it, once was expected",
        )
        require(
            len(self.model.calls[-1]) <= max_num_seqs,
            f"step {step}: {len(self.model.calls[-1])} requests ran, max_num_seqs is {max_num_seqs}",
        )


@serve_step.invariant("the same tokens as one request at a time", share=2)
def _(answer) -> None:
    for seqs, seed, block_size in ((1, 0, 4), (3, 1, 4), (8, 2, 1), (4, 3, 16)):
        run = Served(answer, make_jobs(MIXED, seed), seqs, block_size=block_size)
        _same_tokens(run.jobs, f"{seqs} places")


def _same_tokens(jobs: list[Job], where: str) -> None:
    for job in jobs:
        want = alone(job)
        if job.output != want:
            at = next((i for i, pair in enumerate(zip(job.output, want, strict=False)) if pair[0] != pair[1]), None)
            at = min(len(job.output), len(want)) if at is None else at
            raise Failed(
                f"{where}: request {job.id} got other tokens than alone from its token {at} on:"
                f" {job.output[at : at + 3]}, {want[at : at + 3]} expected ({len(job.output)} tokens of {len(want)})"
            )


@serve_step.invariant("whoever is done leaves in the same step, with its blocks")
def _(answer) -> None:
    jobs = make_jobs([(4, 1), (4, 3), (6, 2)])
    blocks = Blocks(20)
    waiting, running, model = list(jobs), [], PagedModel(blocks)  # type: list[Job], list[Job], PagedModel
    for step, (done, left, free) in enumerate((([0], [1, 2], 16), ([2], [1], 18), ([1], [], 20)), 1):
        got = [j.id for j in answer(waiting, running, blocks, model, 4)]
        require(got == done, f"step {step} returned requests {got} as done, {done} expected")
        require([j.id for j in running] == left, f"after step {step} {[j.id for j in running]} run, {left} expected")
        require(
            blocks.num_free == free,
            f"after step {step} {blocks.num_free} of 20 blocks are free, {free} expected: who is done returns its"
            " blocks",
        )


@serve_step.invariant("a place that is free is taken in the next step")
def _(answer) -> None:
    run = Served(answer, make_jobs([(3, n) for n in (2, 2, 2, 12, 2, 2)]), 4)
    require(
        len(run.after) == 12,
        f"{len(run.after)} steps for answers of 2, 2, 2, 12, 2, 2 tokens in 4 places, 12 expected: is a batch run to"
        " its end before anybody is admitted?",
    )


@serve_step.invariant("everybody who runs gets a token in every step, and nothing is computed twice")
def _(answer) -> None:
    run = Served(answer, make_jobs(MIXED, 5), 3)
    seen = dict.fromkeys(range(len(MIXED)), 0)
    for step, call in enumerate(run.model.calls, 1):
        for request, start, length in call:
            require(
                start == seen[request],
                f"step {step} computes request {request} from token {start}, {seen[request]} of its tokens were"
                " computed already: does num_computed keep count?",
            )
            seen[request] += length
        still = set(run.after[step - 2]) if step > 1 else set()
        left_out = still - {request for request, _, _ in call}
        require(not left_out, f"step {step}: requests {sorted(left_out)} run and got no token")


@serve_step.invariant("who does not fit waits, and nobody overtakes")
def _(answer) -> None:
    run = Served(answer, make_jobs([(4, 12), (8, 16), (2, 2), (1, 3)]), 4, num_blocks=8)
    first = {r: step for step, call in reversed(list(enumerate(run.model.calls, 1))) for r, _, _ in call}
    require(
        [first[i] for i in range(4)] == [1, 13, 13, 13],
        f"first steps of requests 0 to 3: {[first[i] for i in range(4)]}, [1, 13, 13, 13] expected: request 1 needs 6"
        " of 8 blocks, request 0 holds 4 of them for 12 steps",
    )


@serve_step.invariant("an answer ends at its stop token")
def _(answer) -> None:
    jobs = make_jobs([(5, 9), (3, 9)], 7)
    jobs[0].stop = alone(jobs[0])[3]
    Served(answer, jobs, 2)
    require(len(jobs[0].output) == 4, f"request 0 stops at its 4th token and got {len(jobs[0].output)}")
    _same_tokens(jobs, "with a stop token")


plan_chunks = Question(
    "plan_chunks", LAB, "a step holds every decode, then chunks of prompts in order, within its budget"
)


def job(number: int, tokens: int, computed: int = 0) -> Job:
    """A request with some of its tokens computed."""
    return Job(number, [1] * tokens, num_computed=computed, prompt_len=tokens, max_tokens=4)


def planned(answer, running: list[Job], waiting: list[Job], budget: int, seqs: int = 8) -> dict[int, tuple[int, int]]:
    """The plan as id -> (start, length), with what no plan may hold refused."""
    ran, before = list(running), [(j, list(j.tokens), j.num_computed) for j in running + waiting]
    plan = [(c[0], int(c[1]), int(c[2])) for c in answer(running, waiting, budget, seqs)]
    for request, tokens, computed in before:
        kept = request.tokens == tokens and request.num_computed == computed
        require(kept, f"request {request.id} has other tokens or num_computed than before: a plan computes nothing")
    order = [j.id for j in running]
    require(
        running[: len(ran)] == ran, f"running is {order}, {[j.id for j in ran]} expected in front: admit to the end"
    )
    ids = [request.id for request, _, _ in plan]
    require(len(set(ids)) == len(ids), f"requests {ids}: one has more than one chunk in a step")
    total = sum(length for _, _, length in plan)
    require(total <= budget, f"the step holds {total} tokens, the budget is {budget}")
    for request, _, length in plan:
        require(length > 0, f"request {request.id} has a chunk of {length} tokens")
        require(request in running, f"request {request.id} has a chunk and is not in running: admit it first")
    return {request.id: (start, length) for request, start, length in plan}


@plan_chunks.invariant("the example of the docstring")
def _(answer) -> None:
    got = planned(answer, [job(0, 6, 5), job(1, 7, 4)], [job(2, 9)], 8)
    require(got == {0: (5, 1), 1: (4, 3), 2: (0, 4)}, f"the plan is {got}, 0: (5, 1), 1: (4, 3), 2: (0, 4) expected")


@plan_chunks.invariant("decodes come first, wherever they stand")
def _(answer) -> None:
    running = [job(0, 50, 8), job(1, 9, 8), job(2, 30), job(3, 5, 4), job(4, 7, 6)]
    got = planned(answer, running, [], 5)
    missing = [i for i in (1, 3, 4) if i not in got]
    require(
        not missing, f"requests {missing} decode and have no place in a step of 5 tokens: a prompt went before them"
    )
    require(got.get(0) == (8, 2), f"request 0 gets {got.get(0)}, (8, 2) expected: what 3 decodes leave of 5")


@plan_chunks.invariant("the budget is kept, and used up where there is work", share=2)
def _(answer) -> None:
    rng = random.Random(3)
    for _ in range(60):
        running = [job(i, n, rng.choice([n - 1, rng.randrange(n)])) for i, n in enumerate(_lengths(rng, 5))]
        waiting = [job(10 + i, n) for i, n in enumerate(_lengths(rng, 3))]
        budget, seqs = rng.randint(6, 40), 6
        ask = sum(j.pending for j in running) + sum(j.pending for j in waiting[: seqs - len(running)])
        total = sum(length for _, length in planned(answer, running, waiting, budget, seqs).values())
        require(len(running) <= seqs, f"{len(running)} requests run, max_num_seqs is {seqs}")
        require(
            total == min(budget, ask),
            f"the step holds {total} tokens, {min(budget, ask)} expected: the budget is {budget}, and {ask} are"
            " pending of requests that may run",
        )


def _lengths(rng: random.Random, count: int) -> list[int]:
    return [rng.randint(2, 20) for _ in range(rng.randint(1, count))]


@plan_chunks.invariant("prompts are served in order, those that run before those that wait")
def _(answer) -> None:
    running, waiting = [job(0, 20, 15), job(1, 30)], [job(2, 4), job(3, 4)]
    got = planned(answer, running, waiting, 12)
    require(
        got == {0: (15, 5), 1: (0, 7)}, f"the plan is {got}, 0: (15, 5), 1: (0, 7) expected: request 0 first, then 1"
    )
    require([j.id for j in waiting] == [2, 3], "somebody was admitted and gets no token in this step")
    running, waiting = [], [job(2, 4), job(3, 9), job(4, 2)]
    got = planned(answer, running, waiting, 10)
    require(
        got == {2: (0, 4), 3: (0, 6)}, f"the plan is {got}, 2: (0, 4), 3: (0, 6) expected: first come, first served"
    )
    ids = ([j.id for j in running], [j.id for j in waiting])
    require(ids == ([2, 3], [4]), f"running and waiting are {ids}, ([2, 3], [4]) expected")


@plan_chunks.invariant("chunk after chunk, the same tokens as one request at a time", share=2)
def _(answer) -> None:
    for budget, seqs, seed in ((4, 4, 0), (7, 3, 1), (64, 8, 2)):
        jobs = make_jobs([(11, 4), (2, 9), (25, 2, 1), (1, 5, 2), (18, 3, 4), (5, 1, 4)], seed)
        _driven(answer, jobs, budget, seqs)
        _same_tokens(jobs, f"budget {budget}")


@plan_chunks.invariant("nobody's next token is left out of a step, and no prompt starves")
def _(answer) -> None:
    jobs = make_jobs([(2, 60), (2, 60), (2, 60), (40, 2, 3), (40, 2, 4)])
    log = _driven(answer, jobs, 8, 8)
    for number, step in enumerate(log):
        left_out = set(step.decoding) - {request for request, _, _ in step.chunks}
        require(not left_out, f"step {number}: requests {sorted(left_out)} decode and are left out")
    ended = {request: number for number, step in enumerate(log) for request in step.finished}
    require(
        ended[3] <= 14 and ended[4] <= 22,
        f"prompts of 40 tokens beside 3 decodes and a budget of 8 end in steps {ended[3]} and {ended[4]}, at most 14"
        " and 22 were expected: do they advance in every step?",
    )


def _driven(answer, jobs: list[Job], budget: int, seqs: int) -> list[Step]:
    try:
        log = drive(roomy(answer), jobs, Blocks(200), budget, seqs)
    except (Stuck, NoRoom) as error:
        raise Failed(f"budget {budget}: {error}") from None
    for number, step in enumerate(log):
        require(step.tokens <= budget, f"step {number} holds {step.tokens} tokens, the budget is {budget}")
    return log


QUESTIONS = [serve_step, plan_chunks]
