"""Hidden checks of lab 4: what a step holds, preemption, clients that hang up.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require
from labkit.simulate import alone, make_jobs

LAB = "lab4_cuda_graphs"


def serve_log(sizes: list, seed: int, stops: list, seqs: int, num_blocks: int, block_size: int) -> list:
    """Driver: serve_step to the end. Gives the chunks, the done and the free blocks of each step, and all answers."""
    from labkit import simulate

    jobs = simulate.make_jobs(sizes, seed)
    for job, stop in zip(jobs, stops, strict=True):
        job.stop = stop
    blocks = simulate.Blocks(num_blocks, block_size)
    model, waiting = simulate.PagedModel(blocks), list(jobs)
    running: list = []
    log: list = []
    while (waiting or running) and len(log) < 300:
        done = serve_step(waiting, running, blocks, model, seqs)
        log.append([model.calls[-1] if model.calls else [], sorted(job.id for job in done), blocks.num_free])
    return [log, len(model.calls), [job.output for job in jobs]]


def expected_steps(sizes: list, lengths: list[int], seqs: int, num_blocks: int, block_size: int) -> list:
    """What each step holds, from the lengths of the answers: ids, who is done, free blocks."""
    blocks = [-(-(prompt + most) // block_size) for prompt, most in sizes]
    queue, free = list(range(len(sizes))), num_blocks
    left: dict[int, int] = {}
    log: list = []
    while queue or left:
        while queue and len(left) < seqs and blocks[queue[0]] <= free:
            left[queue[0]] = lengths[queue[0]]
            free -= blocks[queue.pop(0)]
        ids = sorted(left)
        done = [i for i in ids if left[i] == 1]
        left = {i: n - 1 for i, n in left.items() if n > 1}
        free += sum(blocks[i] for i in done)
        log.append([ids, done, free])
    return log


def serves(remote: Remote, seed: int, seqs: int, num_blocks: int, block_size: int, stopping: bool) -> None:
    """Compare one run of serve_step with what every step must hold."""
    rng = random.Random(seed)
    sizes = [(rng.randint(1, 14), rng.randint(1, 12)) for _ in range(11)]
    jobs = make_jobs([*sizes], seed)
    answers = [alone(j) for j in jobs]
    stops = [a[len(a) // 2] if stopping and i % 2 else None for i, a in enumerate(answers)]
    for j, stop in zip(jobs, stops, strict=True):
        j.stop = stop
    answers = [alone(j) for j in jobs]
    log, calls, outputs = remote.call(serve_log, sizes, seed, stops, seqs, num_blocks, block_size)
    require(outputs == answers, "the answers are not those of each request alone")
    require(calls == len(log), f"{calls} calls of the model in {len(log)} steps")
    want = expected_steps(sizes, [len(a) for a in answers], seqs, num_blocks, block_size)
    got = [[sorted(c[0] for c in chunks), done, free] for chunks, done, free in log]
    require(got == want, f"seed {seed}: steps hold {got[:6]}, {want[:6]} expected (ids, done, free blocks)")
    tokens = sum(length for chunks, _, _ in log for _, _, length in chunks)
    most = sum(p + len(a) - 1 for (p, _), a in zip(sizes, answers, strict=True))
    require(tokens == most, f"{tokens} tokens computed, {most} are enough")


@hidden_check(LAB, "serve_step")
def ample_memory(remote: Remote) -> None:
    for seed, seqs in ((31, 1), (32, 3), (33, 11)):
        serves(remote, seed, seqs, 200, 4, stopping=False)


@hidden_check(LAB, "serve_step")
def little_memory_and_stop_tokens(remote: Remote) -> None:
    for seed, num_blocks, block_size in ((34, 12, 4), (35, 30, 1), (36, 3, 16)):
        serves(remote, seed, 5, num_blocks, block_size, stopping=True)


def plan(running: list, waiting: list, budget: int, seqs: int) -> list:
    """Driver: plan_chunks on requests given as (id, tokens, computed); gives the chunks and both queues."""
    from labkit import simulate

    queues = [
        [simulate.Job(i, [1] * n, num_computed=done, prompt_len=n, max_tokens=3) for i, n, done in q]
        for q in (running, waiting)
    ]
    chunks = plan_chunks(queues[0], queues[1], budget, seqs)
    state = [[[j.id, len(j.tokens), j.num_computed] for j in q] for q in queues]
    return [[[c[0].id, int(c[1]), int(c[2])] for c in chunks], state]


@hidden_check(LAB, "plan_chunks")
def random_queues(remote: Remote) -> None:
    rng = random.Random(41)
    for _ in range(25):
        running: list[list[int]] = []
        for i in range(rng.randint(0, 6)):
            n = rng.randint(2, 30)
            running.append([i, n, n - 1 if rng.random() < 0.5 else rng.randrange(n - 1)])
        waiting = [[20 + i, rng.randint(1, 30), 0] for i in range(rng.randint(0, 4))]
        budget, seqs = rng.randint(6, 50), 6
        chunks, (ran, waits) = remote.call(plan, running, waiting, budget, seqs)
        pending = {i: n - done for i, n, done in running + waiting}
        order = [i for i, n, done in running if n - done == 1] + [i for i, n, done in running if n - done > 1]
        order += [i for i, _, _ in waiting[: seqs - len(running)]]
        left, want = budget, {}
        for i in order:
            if left > 0:
                want[i] = min(left, pending[i])
                left -= want[i]
        require({i: n for i, _, n in chunks} == want and len(chunks) == len(want), f"{chunks}, lengths {want} expected")
        starts = {i: done for i, _, done in running + waiting}
        require(all(start == starts[i] for i, start, _ in chunks), f"{chunks}: some chunk starts elsewhere")
        admitted = [w for w in waiting if w[0] in want]
        require([ran, waits] == [running + admitted, waiting[len(admitted) :]], f"queues {ran} and {waits}")


def chunked(sizes: list, seed: int, budget: int, seqs: int) -> list:
    """Driver: plan_chunks served to the end, with blocks to spare."""
    from labkit import simulate

    jobs = simulate.make_jobs(sizes, seed)
    log = simulate.drive(simulate.roomy(plan_chunks), jobs, simulate.Blocks(300), budget, seqs, 400)
    return [[[step.chunks, step.decoding] for step in log], [job.output for job in jobs]]


@hidden_check(LAB, "plan_chunks")
def whole_traces(remote: Remote) -> None:
    rng = random.Random(42)
    for seed, budget, seqs in ((1, 5, 5), (2, 12, 3), (3, 100, 8)):
        sizes = [(rng.randint(1, 40), rng.randint(1, 12), rng.randint(0, 9)) for _ in range(9)]
        log, outputs = remote.call(chunked, sizes, seed, budget, seqs)
        require(outputs == [alone(j) for j in make_jobs([*sizes], seed)], "the answers are not those of each alone")
        for chunks, decoding in log:
            require(sum(n for _, _, n in chunks) <= budget, f"a step holds {chunks}, the budget is {budget}")
            require(set(decoding) <= {i for i, _, _ in chunks}, f"{decoding} decode, and the step holds {chunks}")


def scheduled(sizes: list, seed: int, num_blocks: int, budget: int, seqs: int) -> list:
    """Driver: schedule_step served to the end on a small pool."""
    from labkit import simulate

    jobs, blocks = simulate.make_jobs(sizes, seed), simulate.Blocks(num_blocks)
    log = simulate.drive(schedule_step, jobs, blocks, budget, seqs, 400)
    steps = [[s.chunks, s.decoding, s.prefilling, s.preempted, s.waiting] for s in log]
    return [steps, [[job.output, job.preemptions] for job in jobs], blocks.num_free]


def well_scheduled(remote: Remote, sizes: list, seed: int, num_blocks: int, budget: int, seqs: int) -> list:
    """Everything that holds for any run of schedule_step; gives the preemptions of each request."""
    steps, ended, free = remote.call(scheduled, sizes, seed, num_blocks, budget, seqs)
    where = f"{sizes} on {num_blocks} blocks"
    require([o for o, _ in ended] == [alone(j) for j in make_jobs([*sizes], seed)], f"{where}: other tokens than alone")
    require(free == num_blocks, f"{where}: {free} blocks are free at the end")
    seen = 0
    for chunks, decoding, prefilling, preempted, waiting in steps:
        held = {i for i, _, _ in chunks}
        require(sum(n for _, _, n in chunks) <= budget and len(held) <= seqs, f"{where}: a step holds {chunks}")
        ran = sorted(decoding + prefilling)
        want = ran[len(ran) - len(preempted) :]
        require(sorted(preempted) == want, f"{where}: victims {preempted} of {ran}")
        require(not set(preempted) & held, f"{where}: {preempted} were preempted and have a chunk in {chunks}")
        require(not (preempted and held - set(ran)), f"{where}: admitted in a step that preempted {preempted}")
        require(set(decoding) - set(preempted) <= held, f"{where}: somebody who decodes is left out of {chunks}")
        require(waiting == sorted(waiting), f"{where}: waiting is {waiting}")
        seen += len(preempted)
    require(sum(n for _, n in ended) == seen, f"{where}: {seen} preemptions, {[n for _, n in ended]} counted")
    return [n for _, n in ended]


@hidden_check(LAB, "schedule_step")
def tight_pools(remote: Remote) -> None:
    rng = random.Random(43)
    preemptions = 0
    for seed in range(6):
        sizes = [(rng.randint(1, 12), rng.randint(1, 14)) for _ in range(6)]
        counts = well_scheduled(remote, sizes, seed, rng.randint(7, 10), 10, 4)
        require(counts[0] == 0, f"request 0 was preempted {counts[0]} times")
        preemptions += sum(counts)
    require(preemptions > 0, "nobody was ever preempted")


@hidden_check(LAB, "schedule_step")
def ample_pool(remote: Remote) -> None:
    counts = well_scheduled(remote, [(30, 4), (2, 20), (17, 9), (1, 1), (44, 3)], 9, 100, 8, 3)
    require(counts == [0] * 5, f"preemptions {counts} on a pool that holds everything")


@hidden_check(LAB, "schedule_step")
def long_prompts_wait_for_their_room(remote: Remote) -> None:
    for prompt, answer in ((42, 2), (44, 1)):
        counts = well_scheduled(remote, [(6, 30), (prompt, answer)], 11, 12, 6, 4)
        require(counts == [0, 0], f"a prompt of {prompt} tokens was preempted {counts[1]} times")


def hung_up(running: list, waiting: list, ids: list) -> list:
    """Driver: fixed_abort on requests given as (id, tokens, computed, prompt_len); gives what is left."""
    from labkit import simulate

    blocks = simulate.Blocks(60)
    queues = [
        [simulate.Job(i, [1] * n, num_computed=done, prompt_len=p, max_tokens=9) for i, n, done, p in q]
        for q in (running, waiting)
    ]
    for job in queues[0]:
        blocks.grow(job, job.num_computed + 1)
    held = {job.id: len(job.block_table) for job in queues[0]}
    gone = fixed_abort(set(ids), queues[1], queues[0], blocks)
    return [sorted(j.id for j in gone), [[j.id for j in q] for q in queues], blocks.num_free, [held[i] for i in held]]


@hidden_check(LAB, "fixed_abort")
def whoever_it_is(remote: Remote) -> None:
    rng = random.Random(44)
    for trial in range(12):
        running = []
        for i in range(6):
            prompt = rng.randint(4, 20)
            done = rng.choice([rng.randrange(1, prompt), prompt + 2])
            running.append([i, max(prompt, done + 1), done, prompt])
        waiting = [[10 + i, 5, 0, 5] for i in range(4)]
        ids = [*rng.sample([r[0] for r in running + waiting], 3 + trial % 5), 3, 4, 11, 99]
        gone, left, free, held = remote.call(hung_up, running, waiting, ids)
        require(gone == sorted(set(ids) - {99}), f"aborting {ids} returned {gone}")
        want = [[r[0] for r in q if r[0] not in ids] for q in (running, waiting)]
        require(left == want, f"aborting {ids} left {left}, {want} expected")
        owned = sum(n for i, n in enumerate(held) if i not in ids)
        require(free == 60 - owned, f"aborting {ids}: {free} of 60 blocks are free, {60 - owned} expected")
