"""Buckets: padding a batch, and choosing the sizes to capture."""

from __future__ import annotations

import random
from itertools import combinations

import torch

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab4_cuda_graphs.cases import refused, within

LAB = "lab4_cuda_graphs"

pad_batch = Question("pad_batch", LAB, "a batch goes into the smallest bucket, and what pads it writes nowhere")

ROWS, WIDTH, BLOCK = 8, 4, 4
SIZES = [1, 2, 4, 8]


def buffers() -> dict[str, torch.Tensor]:
    """Static buffers as a fuller step left them: every row points at a real slot."""
    one = torch.arange(ROWS, dtype=torch.int32)
    table = torch.arange(ROWS * WIDTH, dtype=torch.int32).view(ROWS, WIDTH) + 1
    return {
        "tokens": one + 50,
        "positions": one + 1,
        "slot_mapping": one + 17,
        "seq_lens": one + 2,
        "block_table": table,
    }


BATCH = [(11, 5, [3, 9]), (12, 0, [4, 7]), (13, 15, [6, 1, 8, 2])]
"""(token, position, blocks) of three sequences, the second with a block to spare; their slots are 9 * 4 + 1, 4 * 4 and
2 * 4 + 3."""


@pad_batch.invariant("the smallest bucket that holds the batch, and how many rows it pads")
def _(answer) -> None:
    for rows, want in ((1, (1, 0)), (2, (2, 0)), (3, (4, 1)), (5, (8, 3)), (8, (8, 0))):
        got = answer(buffers(), [(1, 0, [i]) for i in range(rows)], SIZES, BLOCK)
        require(
            isinstance(got, (tuple, list)) and tuple(got) == want,
            f"{rows} rows with buckets {SIZES}: {got}, {want} expected (bucket, padded rows)",
        )


@pad_batch.invariant("a batch that no bucket holds gives None and changes nothing")
def _(answer) -> None:
    held, before = buffers(), buffers()
    got = answer(held, [(1, 0, [i]) for i in range(5)], [1, 2, 4], BLOCK)
    require(got is None, f"5 rows with buckets [1, 2, 4]: {got}, None expected: the step has to run without a graph")
    for name, tensor in held.items():
        require(torch.equal(tensor, before[name]), f"{name} was changed for a batch that no bucket holds")


@pad_batch.invariant("real rows say what, where and how long", share=2)
def _(answer) -> None:
    held = buffers()
    answer(held, BATCH, SIZES, BLOCK)
    want = {"tokens": [11, 12, 13], "positions": [5, 0, 15], "slot_mapping": [37, 16, 11], "seq_lens": [6, 1, 16]}
    for name, values in want.items():
        got = held[name][:3].tolist()
        require(got == values, f"{name} of the three real rows is {got}, {values} expected")
    got, table = held["block_table"][:3].tolist(), [[3, 9, 0, 0], [4, 7, 0, 0], [6, 1, 8, 2]]
    require(got == table, f"block_table of the three real rows is {got}, {table} expected: zeros after the last block")


@pad_batch.invariant("a padded row writes nowhere", share=2)
def _(answer) -> None:
    held = buffers()
    answer(held, BATCH, SIZES, BLOCK)
    cache = torch.zeros(40)  # one number a slot: whose token stands there
    cache[20] = 7.0  # slot 20 belonged to row 3 in the step before, and now to another request
    for token, slot in zip(held["tokens"][:4].tolist(), held["slot_mapping"][:4].tolist(), strict=True):
        if slot >= 0:
            cache[slot] = token
    slot = int(held["slot_mapping"][3])
    require(
        float(cache[20]) == 7.0, f"row 3 is padding and still has slot {slot}: it overwrites a token of another request"
    )
    require(slot == -1, f"row 3 is padding and has slot {slot}, -1 expected: any other is somebody's place")


@pad_batch.invariant("a padded row attends to nothing")
def _(answer) -> None:
    held = buffers()
    answer(held, BATCH, SIZES, BLOCK)
    for name in ("seq_lens", "tokens", "positions"):
        got = int(held[name][3])
        require(got == 0, f"{name} of the padded row 3 is {got}, 0 expected: it reads what a sequence left there")
    row = held["block_table"][3].tolist()
    require(not any(row), f"block_table of the padded row 3 is {row}, zeros expected")


@pad_batch.invariant("the buffers stay where they are")
def _(answer) -> None:
    held = buffers()
    before = {name: (id(t), t.data_ptr(), t.dtype) for name, t in held.items()}
    answer(held, BATCH, SIZES, BLOCK)
    for name, tensor in held.items():
        require(
            (id(tensor), tensor.data_ptr(), tensor.dtype) == before[name],
            f"{name} is another tensor now: a captured graph reads the old one. Write into it",
        )


fixed_capture_sizes = Question(
    "fixed_capture_sizes", LAB, "every batch that may come has a graph, and no graph is idle"
)


@fixed_capture_sizes.invariant("batches of 1 to the largest, whatever the largest is")
def _(answer) -> None:
    for largest in (12, 1, 3, 8, 16, 20, 40, 100, 256, 300):
        got = list(answer(largest))
        require(got == sorted(set(got)), f"largest {largest}: sizes {got} are not ascending, each once")
        top = got[-1] if got else 0
        require(top >= largest, f"largest {largest}: a batch of {largest} has no graph, the largest size is {top}")
        require(top == largest, f"largest {largest}: a graph of {top} rows is captured, and never needed")
        missing = [s for s in (1, 2, 4, 8, *range(16, largest, 16)) if s < largest and s not in got]
        require(not missing, f"largest {largest}: sizes {missing} are gone, and batches just below them pad more")
        most = len([s for s in (1, 2, 4, 8, *range(16, largest, 16)) if s < largest]) + 1
        require(len(got) <= most, f"largest {largest}: {len(got)} graphs are captured, {most} are enough")


bucket_ladder = Question("bucket_ladder", LAB, "no other choice of sizes within the budget takes less time")


SEARCH_S = 20.0  # a table of half-built ladders takes a hundredth of this


def seconds_of(ladder, histogram: dict[int, int], capture_s: dict[int, float], row_s: float) -> float:
    """Time that a ladder costs: captures, and rows computed for nobody. Failed for one that is none."""
    sizes = sorted(set(ladder))
    if list(ladder) != sizes or not set(sizes) <= set(capture_s):
        raise Failed(f"the ladder {list(ladder)} is not an ascending choice of the sizes {sorted(capture_s)}")
    largest = max(histogram)
    if not sizes or sizes[-1] < largest:
        raise Failed(f"the ladder {sizes} has no size for the largest batch, {largest}")
    padded = sum(n * (next(s for s in sizes if s >= b) - b) for b, n in histogram.items())
    return sum(capture_s[s] for s in sizes) + row_s * padded


def instance(seed: int, sizes: int, largest: int) -> tuple[dict, dict, dict, float]:
    """A random histogram, and prices of `sizes` candidate sizes up to `largest`, which no batch need reach."""
    rng = random.Random(seed)
    candidates = sorted({*rng.sample(range(1, largest), sizes - 1), largest})
    histogram = {b: rng.randint(1, 400) for b in rng.sample(range(1, largest - rng.choice([0, 8])), 3 * sizes)}
    memory = {s: rng.randint(2, 9) + s // 16 for s in candidates}
    capture_s = {s: round(0.1 + 0.3 * rng.random(), 3) for s in candidates}
    return histogram, memory, capture_s, rng.choice([0.0005, 0.002, 0.01])


def optimum(histogram: dict, memory: dict, capture_s: dict, row_s: float, budget: int) -> float | None:
    """The least time of all ladders within the budget, by trying each; None if there is none."""
    sizes, best = sorted(memory), None
    for count in range(1, len(sizes) + 1):
        for ladder in combinations(sizes, count):
            if ladder[-1] >= max(histogram) and sum(memory[s] for s in ladder) <= budget:
                cost = seconds_of(ladder, histogram, capture_s, row_s)
                best = cost if best is None or cost < best else best
    return best


@bucket_ladder.invariant("the example of the docstring")
def _(answer) -> None:
    got = answer({1: 100, 3: 10, 4: 50}, {1: 2, 2: 2, 3: 2, 4: 4}, dict.fromkeys((1, 2, 3, 4), 0.5), 0.01, 6)
    require(list(got) == [1, 4], f"{got}, [1, 4] expected")


@bucket_ladder.invariant("the largest batch has a size")
def _(answer) -> None:
    for seed in range(4):
        histogram, memory, capture_s, row_s = instance(seed, 6, 40)
        seconds_of(answer(histogram, memory, capture_s, row_s, 60), histogram, capture_s, row_s)


@bucket_ladder.invariant("the memory budget is kept")
def _(answer) -> None:
    for seed in range(6):
        histogram, memory, capture_s, row_s = instance(seed, 7, 48)
        for budget in (12, 20):
            ladder = answer(histogram, memory, capture_s, row_s, budget)
            took = sum(memory.get(s, 0) for s in ladder)
            require(took <= budget, f"the ladder {ladder} takes {took} MiB of {budget}")


@bucket_ladder.invariant("nothing is better, of all choices of up to 9 sizes", share=3)
def _(answer) -> None:
    for seed in range(10):
        histogram, memory, capture_s, row_s = instance(seed, 5 + seed % 5, 40)
        for budget in (14, 25, 99):
            best = optimum(histogram, memory, capture_s, row_s, budget)
            if best is not None:
                _optimal(answer(histogram, memory, capture_s, row_s, budget), best, histogram, capture_s, row_s, budget)


def _optimal(ladder, best: float, histogram: dict, capture_s: dict, row_s: float, budget: int) -> None:
    cost = seconds_of(ladder, histogram, capture_s, row_s)
    require(
        cost <= best + 1e-9,
        f"the ladder {list(ladder)} costs {cost:.3f} s where {best:.3f} s are possible, with sizes {sorted(capture_s)},"
        f" {row_s} s a row and {budget} MiB: padded rows and captures both count",
    )


@bucket_ladder.invariant("forty sizes are no problem: there are a million million choices")
def _(answer) -> None:
    sizes = list(range(4, 164, 4))
    histogram = dict.fromkeys(sizes, 100)
    with within(SEARCH_S, "40 sizes have a million million subsets; are they tried one by one?"):
        ladder = answer(histogram, dict.fromkeys(sizes, 1), dict.fromkeys(sizes, 0.4), 0.001, 10)
    # ten sizes: all equal gaps are the best there is, and 0.4 s a capture is less than what any of them saves
    best = seconds_of(list(range(16, 161, 16)), histogram, dict.fromkeys(sizes, 0.4), 0.001)
    _optimal(ladder, best, histogram, dict.fromkeys(sizes, 0.4), 0.001, 10)


@bucket_ladder.invariant("a budget that no ladder fits is an error that names it")
def _(answer) -> None:
    refused(lambda: answer({5: 1}, {4: 1, 8: 7}, {4: 0.1, 8: 0.1}, 0.01, 6), "6", "8 rows at 7 MiB in a budget of 6")


QUESTIONS = [pad_batch, fixed_capture_sizes, bucket_ladder]
