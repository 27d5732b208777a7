"""Which graph a batch runs in, and which sizes are worth a graph."""

from __future__ import annotations

import itertools
import random
import time

from labkit.checks.contract import Question, require

LAB = "lab5_vllm_serving"
SHIPPED = ("labkit.serve.graphs",)
MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
SIZES = [1, 2, 4, 8, 16]

dispatch_batch = Question(
    "dispatch_batch", LAB, "each mode runs a batch in the graph that vLLM's dispatcher chooses", SHIPPED
)


def expected(mode: str, sizes: list[int], max_num_seqs: int, num_tokens: int, decode: bool) -> tuple[str, int]:
    """What vLLM's dispatcher says; tests/serve/test_lab_checks.py compares it with vLLM itself."""
    padded = min((size for size in sizes if size >= num_tokens), default=0)
    separate = mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
    if padded and (mode == "FULL" or (separate and decode and padded <= max_num_seqs)):
        return "FULL", padded
    if padded and "PIECEWISE" in mode:
        return "PIECEWISE", padded
    return "NONE", num_tokens


def _says(answer, mode: str, tokens: int, decode: bool, look_at: str, max_num_seqs: int = 16) -> None:
    got = answer(mode, list(SIZES), max_num_seqs, tokens, decode)
    want = expected(mode, SIZES, max_num_seqs, tokens, decode)
    what = f"{tokens} {'decodes' if decode else 'tokens with a prefill among them'} under {mode}, max_num_seqs"
    good = isinstance(got, tuple | list) and tuple(got) == want
    require(good, f"{look_at}: {what} {max_num_seqs}: {got!r}, {want} expected, sizes {SIZES}")


@dispatch_batch.invariant("a batch is padded to the next size, and one that is a size is not")
def _(answer) -> None:
    for tokens in range(1, 17):
        _says(answer, "FULL", tokens, True, "padding goes to the smallest size that holds the batch")


@dispatch_batch.invariant("beyond the largest size nothing is replayed and nothing is padded")
def _(answer) -> None:
    for mode, decode in itertools.product(MODES, (True, False)):
        _says(answer, mode, 17, decode, "no graph is large enough", max_num_seqs=32)


@dispatch_batch.invariant("NONE runs everything as it is")
def _(answer) -> None:
    for tokens in (1, 3, 16):
        _says(answer, "NONE", tokens, True, "without graphs there is nothing to pad for")


@dispatch_batch.invariant("a batch with a prefill has a full graph only where all batches have")
def _(answer) -> None:
    for mode in MODES:
        _says(answer, mode, 9, False, "which modes capture batches that hold a prefill, and how?")


@dispatch_batch.invariant("decodes have a graph of their own where the mode says so")
def _(answer) -> None:
    for mode, tokens in itertools.product(MODES, (3, 9)):
        _says(answer, mode, tokens, True, "the first half of a mode's name is what decodes get")


@dispatch_batch.invariant("a decode graph is never larger than max_num_seqs")
def _(answer) -> None:
    for mode in ("FULL_DECODE_ONLY", "FULL_AND_PIECEWISE", "PIECEWISE", "FULL"):
        look_at = "a decode graph of more requests than the scheduler runs is not captured"
        if mode in ("PIECEWISE", "FULL"):
            look_at = (
                "only modes with graphs for decodes alone end at max_num_seqs: this one has the same for all batches"
            )
        _says(answer, mode, 5, True, look_at, max_num_seqs=6)
        _says(answer, mode, 3, True, look_at, max_num_seqs=6)


fit_capture_sizes = Question(
    "fit_capture_sizes", LAB, "the sizes waste the fewest rows that so few graphs can", SHIPPED
)


def rows_computed(steps: dict[int, int], sizes: list[int]) -> int:
    """Rows of all steps, padding included; every batch must fit a size."""
    return sum(count * min(size for size in sizes if size >= batch) for batch, count in steps.items())


def best_rows(steps: dict[int, int], most: int) -> int:
    """The fewest rows that `most` sizes can compute: dynamic programming over the batches that occur."""
    batches = sorted(steps)
    best = {0: {0: 0}}  # sizes used -> batches covered -> rows
    for used in range(1, most + 1):
        best[used] = {}
        for end in range(1, len(batches) + 1):
            options = [
                rows + batches[end - 1] * sum(steps[b] for b in batches[start:end])
                for start, rows in best[used - 1].items()
                if start < end
            ]
            if options:
                best[used][end] = min(options)
    return min(found[len(batches)] for found in best.values() if len(batches) in found)


def _fits(answer, steps: dict[int, int], most: int) -> float:
    got = answer(dict(steps), most)
    require(isinstance(got, list | tuple), f"a list of sizes was expected, not {type(got).__name__}")
    sizes = list(got)
    require(0 < len(sizes) <= most, f"{len(sizes)} sizes, and {most} at most are allowed: {sizes}")
    require(sizes == sorted(set(sizes)), f"sizes must ascend, each once: {sizes}")
    require(sizes[-1] >= max(steps), f"batches of {max(steps)} have no graph: the largest size is {sizes[-1]}")
    rows, fewest = rows_computed(steps, sizes), best_rows(steps, most)
    look_at = "weigh each batch by its steps, and compare all ways to place the sizes"
    given = str(steps) if len(steps) < 12 else f"{len(steps)} different batches"
    require(
        rows <= fewest,
        f"{look_at}: {sizes} compute {rows:,} rows, {fewest:,} are enough with {most} sizes; steps: {given}",
    )
    return rows / fewest


@fit_capture_sizes.invariant("one graph is as large as the largest batch")
def _(answer) -> None:
    _fits(answer, {3: 10, 20: 1}, 1)


@fit_capture_sizes.invariant("with a graph for each batch nothing is padded")
def _(answer) -> None:
    steps = {1: 4, 6: 1, 7: 9, 30: 2}
    _fits(answer, steps, 4)
    _fits(answer, steps, 9)


@fit_capture_sizes.invariant("a batch counts as often as it occurs")
def _(answer) -> None:
    _fits(answer, {4: 1, 5: 1000, 6: 1, 16: 3}, 2)
    _fits(answer, {4: 1000, 5: 1, 6: 1, 16: 3}, 2)


@fit_capture_sizes.invariant("no step by step choice: the best sizes for three graphs need not hold those for two")
def _(answer) -> None:
    _fits(answer, {3: 1, 7: 1, 9: 1, 12: 1}, 3)  # 7 and 12 are the best two; 3, 9 and 12 the best three
    rng = random.Random(2)
    for _ in range(12):
        steps = {batch: rng.choice([1, 1, 2, 20]) for batch in rng.sample(range(1, 60), 8)}
        _fits(answer, steps, rng.randint(2, 5))


SLOW_S = 1.5  # of processor time; the solution takes some milliseconds


@fit_capture_sizes.invariant("a few more batches do not multiply its time", stops=True)
def _(answer) -> None:
    """An answer that tries all choices would not end on a day's traffic, and nobody would learn why."""
    rng = random.Random(5)
    for batches in range(8, 41, 4):
        steps, most = {batch: rng.randint(1, 90) for batch in range(1, batches + 1)}, batches // 3
        began = time.process_time()
        answer(steps, most)
        took = time.process_time() - began
        require(
            took < SLOW_S,
            f"{took:.1f} s for {batches} batches and {most} sizes, and a day has 100 batches: what is asked again and "
            "again for the same batch and the same number of sizes is to be remembered (functools.cache)",
        )


@fit_capture_sizes.invariant("a day's traffic of 100 different batches")
def _(answer) -> None:
    rng = random.Random(3)
    _fits(answer, {batch: 1 + int(1000 * rng.expovariate(0.05 * batch)) for batch in range(1, 101)}, 12)


QUESTIONS = [dispatch_batch, fit_capture_sizes]
