"""Hidden checks of lab 4: padding, bucket ladders, warm-up.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import math
import random

from grading.blackbox import Remote, hidden_check, require

LAB = "lab4_cuda_graphs"


def padded(rows: list, sizes: list[int], block_size: int) -> list:
    """Driver: pad_batch into buffers that a fuller step left behind; gives its result and the buffers."""
    import torch

    names = ("tokens", "positions", "slot_mapping", "seq_lens")
    buffers = {name: torch.full((16,), 90 + n, dtype=torch.int32) for n, name in enumerate(names)}
    buffers["block_table"] = torch.full((16, 6), 33, dtype=torch.int32)
    before = {name: tensor.data_ptr() for name, tensor in buffers.items()}
    result = pad_batch(buffers, [(t, p, list(b)) for t, p, b in rows], sizes, block_size)
    stayed = all(buffers[name].data_ptr() == before[name] for name in before)
    return [result and [int(n) for n in result], {n: t.tolist() for n, t in buffers.items()}, stayed]


@hidden_check(LAB, "pad_batch")
def random_batches(remote: Remote) -> None:
    rng = random.Random(41)
    for count in (1, 3, 6, 9, 16):
        block_size = rng.choice([2, 4, 8])
        rows: list[list] = []
        for _ in range(count):
            position = rng.randrange(6 * block_size)
            rows.append([rng.randrange(1000), position, [rng.randrange(99) for _ in range(position // block_size + 1)]])
        sizes = [1, 4, 6, 12, 16]
        size = next(s for s in sizes if s >= count)
        result, held, stayed = remote.call(padded, rows, sizes, block_size)
        require(result == [size, size - count], f"{count} rows in buckets {sizes}: {result}")
        require(stayed, "a buffer was replaced")
        slots = [b[p // block_size] * block_size + p % block_size for _, p, b in rows]
        want = {
            "tokens": [t for t, _, _ in rows] + [0] * (size - count),
            "positions": [p for _, p, _ in rows] + [0] * (size - count),
            "slot_mapping": slots + [-1] * (size - count),
            "seq_lens": [p + 1 for _, p, _ in rows] + [0] * (size - count),
            "block_table": [b + [0] * (6 - len(b)) for _, _, b in rows] + [[0] * 6] * (size - count),
        }
        for name, values in want.items():
            require(held[name][:size] == values, f"{name} of {count} rows in bucket {size}: {held[name][:size]}")


@hidden_check(LAB, "pad_batch")
def too_many_rows(remote: Remote) -> None:
    result, held, _ = remote.call(padded, [[1, 0, [2]]] * 5, [2, 4], 4)
    require(result is None, f"5 rows in buckets [2, 4]: {result}")
    require(held["tokens"] == [90] * 16, "buffers were written for a batch that no bucket holds")


@hidden_check(LAB, "fixed_capture_sizes")
def every_largest(remote: Remote) -> None:
    for largest in (2, 5, 7, 9, 15, 17, 31, 33, 64, 65, 511, 512):
        got = remote.call("fixed_capture_sizes", largest)
        want = [s for s in (1, 2, 4, 8, *range(16, largest, 16)) if s < largest] + [largest]
        require(list(got) == want, f"largest {largest}: sizes {got}, {want} expected")


def laddered(histogram: list, memory: list, capture_s: list, row_s: float, budget: int) -> list:
    """Driver: bucket_ladder of tables given as pairs; the error's text if it raises ValueError."""
    try:
        return [int(s) for s in bucket_ladder(dict(histogram), dict(memory), dict(capture_s), row_s, budget)]
    except ValueError as error:
        return [str(error)]


def least_seconds(histogram: list, memory: list, capture_s: list, row_s: float, budget: int) -> float:
    """The optimum, by its own recursion from the largest size down; inf if there is no ladder."""
    price, seconds, sizes = dict(memory), dict(capture_s), sorted(s for s, _ in memory)
    known: dict[tuple[int, int], float] = {}

    def below(top: int, left: int) -> float:
        """Least seconds for all batches up to `top`, whose size is chosen, with `left` MiB for sizes below it."""
        if (top, left) not in known:
            best = row_s * sum(n * (top - b) for b, n in histogram if b <= top)
            for size in (s for s in sizes if s < top and price[s] <= left):
                between = row_s * sum(n * (top - b) for b, n in histogram if size < b <= top)
                best = min(best, between + seconds[size] + below(size, left - price[size]))
            known[top, left] = best
        return known[top, left]

    tops = [s for s in sizes if s >= max(b for b, _ in histogram) and price[s] <= budget]
    return min((seconds[s] + below(s, budget - price[s]) for s in tops), default=math.inf)


def _ladder_case(seed: int, count: int, largest: int) -> tuple[list, list, list, float, int]:
    rng = random.Random(seed)
    sizes = sorted({*rng.sample(range(1, largest), count), largest + rng.randint(0, 3)})
    histogram = [[b, rng.randint(1, 300)] for b in sorted(rng.sample(range(1, largest + 1), 2 * count))]
    memory = [[s, rng.randint(1, 7)] for s in sizes]
    capture_s = [[s, round(rng.uniform(0.05, 0.6), 3)] for s in sizes]
    return histogram, memory, capture_s, rng.choice([3e-4, 1e-3, 2e-2]), rng.randint(9, 40)


def _is_optimal(remote: Remote, seed: int, count: int, largest: int) -> None:
    case = histogram, memory, capture_s, row_s, budget = _ladder_case(seed, count, largest)
    got, want = remote.call(laddered, *case), least_seconds(*case)
    require(all(isinstance(s, int) for s in got), f"an error where a ladder fits: {got}")
    require(got == sorted(set(got)) and set(got) <= {s for s, _ in memory}, f"the ladder {got} is none of the sizes")
    require(bool(got) and got[-1] >= max(b for b, _ in histogram), f"the ladder {got} does not hold the largest batch")
    require(sum(dict(memory)[s] for s in got) <= budget, f"the ladder {got} is over the budget of {budget} MiB")
    padded_rows = sum(n * (next(s for s in got if s >= b) - b) for b, n in histogram)
    cost = sum(dict(capture_s)[s] for s in got) + row_s * padded_rows
    require(cost <= want + 1e-9, f"the ladder {got} costs {cost:.3f} s where {want:.3f} s are possible")


@hidden_check(LAB, "bucket_ladder")
def small_optima(remote: Remote) -> None:
    for seed in range(12):
        _is_optimal(remote, seed, 6, 50)


@hidden_check(LAB, "bucket_ladder")
def large_optima(remote: Remote) -> None:
    for seed in (70, 71, 72):
        _is_optimal(remote, seed, 35, 256)


@hidden_check(LAB, "bucket_ladder")
def no_ladder(remote: Remote) -> None:
    (said,) = remote.call(laddered, [[9, 5]], [[8, 1], [16, 12]], [[8, 0.1], [16, 0.1]], 0.001, 11)
    require(isinstance(said, str) and "11" in said, f"no ladder fits into 11 MiB, and the answer was {said}")
    (said,) = remote.call(laddered, [[9, 5]], [[8, 1]], [[8, 0.1]], 0.001, 50)
    require(isinstance(said, str), f"no size holds a batch of 9, and the answer was {said}")


def warmed(sizes: list[int], firsts: list, each: float) -> list:
    """Driver: warm_up on a machine whose bucket i takes firsts[i] more seconds the first time."""
    now, order, left = [0.0], [], dict(firsts)

    def run(size):
        order.append(size)
        now[0] += each * size + left.pop(size, 0.0)

    got = warm_up(sizes, run, lambda: now[0])
    return [[[int(s), float(t)] for s, t in got.items()], order]


@hidden_check(LAB, "warm_up")
def other_machines(remote: Remote) -> None:
    firsts = [[1, 0.0], [64, 7.5], [3, 0.25], [200, 1.0]]
    got, order = remote.call(warmed, [3, 200, 1, 64], firsts, 0.5)
    require(order == [200, 200, 64, 64, 3, 3, 1, 1], f"buckets were run in the order {order}")
    for size, seconds in firsts:
        found = dict(got).get(size)
        require(found is not None and abs(found - seconds) < 1e-9, f"bucket {size}: {found} s more, {seconds} expected")
