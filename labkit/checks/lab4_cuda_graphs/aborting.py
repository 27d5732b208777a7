"""A bug hunt: clients that hang up."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.checks.lab4_cuda_graphs.stepping import LAB, job
from labkit.simulate import Blocks, Job

fixed_abort = Question("fixed_abort", LAB, "whoever hangs up is gone, wherever it was, and leaves no block behind")


def queues() -> tuple[list[Job], list[Job], Blocks]:
    """Requests 0 to 3 run, 1 and 2 of them in the middle of their prompts; 4 to 6 wait."""
    blocks = Blocks(20)
    running, waiting = [job(0, 9, 8), job(1, 12, 4), job(2, 16, 8), job(3, 5, 4)], [job(i, 6) for i in (4, 5, 6)]
    for request in running:
        request.prompt_len = len(request.tokens) - (request.pending == 1)
        blocks.grow(request, request.num_computed + 1)
    return waiting, running, blocks


def aborted(answer, ids: set[int], fault: str) -> None:
    """Abort some of the queues' requests and look at everything that is left."""
    waiting, running, blocks = queues()
    everybody = {r.id: r for r in waiting + running}
    held = {r.id: len(r.block_table) for r in running}
    want = [r.id for r in waiting if r.id not in ids], [r.id for r in running if r.id not in ids]
    got = answer(set(ids), waiting, running, blocks)
    require(
        isinstance(got, list) and all(isinstance(r, Job) for r in got),
        f"{fault}: {got!r} was returned, a list of the aborted requests was expected",
    )
    left = [r.id for r in waiting], [r.id for r in running]
    require(left == want, f"{fault}: after aborting {sorted(ids)} waiting and running are {left}, {want} expected")
    free = 20 - sum(n for i, n in held.items() if i not in ids)
    require(
        blocks.num_free == free,
        f"{fault}: after aborting {sorted(ids)} {blocks.num_free} of 20 blocks are free, {free} expected",
    )
    require(
        sorted(r.id for r in got) == sorted(ids & set(everybody)),
        f"{fault}: {got!r} was returned, the aborted requests {sorted(ids & set(everybody))} were expected",
    )


@fixed_abort.invariant("two neighbours that hang up are both gone")
def _(answer) -> None:
    for ids in ({0, 1}, {0, 1, 2, 3}, {2, 3, 77}):
        aborted(answer, ids, "neighbours in `running`")


@fixed_abort.invariant("a request in the middle of its prompt gives its blocks back")
def _(answer) -> None:
    for ids in ({1}, {2}, {0, 2}):
        aborted(answer, ids, "a prompt that is computed in part")


@fixed_abort.invariant("a request that waits is never served")
def _(answer) -> None:
    for ids in ({5}, {4, 5, 6}, {0, 6}):
        aborted(answer, ids, "a request that waits")


QUESTIONS = [fixed_abort]
