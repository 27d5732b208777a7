"""Hidden checks of lab 4: launches, capture and replay, mistakes.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import math
import random

import numpy as np

from grading.blackbox import Remote, hidden_check, require

LAB = "lab4_cuda_graphs"


def counted(ops: list[list]) -> int:
    """Driver: count_launches of operations given as [name, reads, gives, in_place]."""
    from labkit.oplog import Op

    return int(count_launches([Op(name, tuple(reads), tuple(gives), in_place) for name, reads, gives, in_place in ops]))


@hidden_check(LAB, "count_launches")
def random_logs(remote: Remote) -> None:
    rng = random.Random(31)
    for _ in range(4):
        ops, want = [], 0
        for n in range(1, 60):
            kind = rng.choice(["view", "write", "kernel", "empty", "fill", "two", "optional"])
            here, other = 10 * n, 10 * n + 5
            ops.append(
                {
                    "view": [rng.choice(["unbind", "view", "alias", "contiguous"]), [other], [other], False],
                    "write": [rng.choice(["mul_", "copy_", "index_put_"]), [here, other], [here], True],
                    "kernel": [rng.choice(["mm", "reshape", "clone", "to"]), [other, here], [here + 1], False],
                    "empty": [rng.choice(["empty", "empty_like", "new_empty", "empty_strided"]), [], [here], False],
                    "fill": [rng.choice(["zeros", "ones", "arange", "rand"]), [], [here], False],
                    "two": ["sort", [here], [here + 1, here + 2], False],
                    "optional": ["split", [here, other], [other, other], False],
                }[kind]
            )
            want += kind in ("write", "kernel", "fill", "two")
        got = remote.call(counted, ops)
        require(got == want, f"{got} launches counted in a random log, {want} expected")


@hidden_check(LAB, "launch_bound_until")
def random_machines(remote: Remote) -> None:
    rng = random.Random(32)
    for _ in range(12):
        launches, us = rng.randint(1, 4000), rng.uniform(1, 20)
        weights, kv, bandwidth = rng.uniform(1e8, 3e10), rng.uniform(1e6, 4e8), rng.uniform(1e12, 8e12)
        got = remote.call("launch_bound_until", launches, us * 1e-6, weights, kv, bandwidth)
        exact = (launches * us * 1e-6 * bandwidth - weights) / kv
        want = max(0, math.ceil(exact) - 1)
        if abs(exact - round(exact)) > 1e-6:
            require(got == want, f"{launches} launches of {us:.2f} us: batch {got}, {want} expected")


def replays(seeds: list[int], rows: int) -> list:
    """Driver: results of a CapturedStep and of the step itself; captures, replays, and steps run in its calls."""
    import torch

    from labkit.graph_simulator import Graph, simulated_capture

    counts = {"captures": 0, "replays": 0, "steps": 0}

    def inputs(seed):
        generator = torch.Generator().manual_seed(seed)
        x, w = torch.randn(rows, 6, generator=generator), torch.randn(6, generator=generator)
        return x, w, torch.randint(0, rows, (rows,), generator=generator)

    def step(x, w, order):
        counts["steps"] += 1
        return (x * w).index_select(0, order).relu().sum(1)

    def capture(work):
        counts["captures"] += 1
        graph = simulated_capture(work)

        def replay():
            counts["replays"] += 1
            graph.replay()

        return Graph(replay, graph.outputs)

    captured = CapturedStep(step, inputs(0), capture)
    counts["replays"] = counts["steps"] = 0
    results = [captured(*inputs(seed)) for seed in seeds]
    counted = dict(counts)
    return [[r.tolist() for r in results], [step(*inputs(seed)).tolist() for seed in seeds], counted]


@hidden_check(LAB, "captured_step")
def many_calls(remote: Remote) -> None:
    for rows in (1, 5):
        got, want, counts = remote.call(replays, [3, 4, 5, 3], rows)
        require(
            np.allclose(got, want, atol=1e-5), f"{rows} rows: results {got}, {want} expected after all calls were made"
        )
        expected = {"captures": 1, "replays": 4, "steps": 0}
        require(counts == expected, f"{counts} for four calls, {expected} expected")


def refusals() -> list:
    """Driver: what a CapturedStep says to inputs of other shapes and dtypes, and its result afterwards."""
    import torch

    from labkit.graph_simulator import simulated_capture

    captured = CapturedStep(lambda a, b: a + b, (torch.zeros(2, 3), torch.zeros(2, 3)), simulated_capture)
    good = (torch.ones(2, 3), torch.full((2, 3), 2.0))
    said = []
    for bad in (
        (good[0], good[1][:, :1]),
        (good[0][0], good[1]),
        (good[0].int(), good[1]),
        (good[0], torch.zeros(3, 2)),
    ):
        try:
            captured(*bad)
            said.append("accepted")
        except ValueError as error:
            said.append(str(error))
    return [said, captured(*good).tolist()]


@hidden_check(LAB, "captured_step")
def what_does_not_fit_is_refused(remote: Remote) -> None:
    said, after = remote.call(refusals)
    for text, number in zip(said, "1001", strict=True):
        require(text != "accepted", f"an input that does not fit was accepted: input {number}")
        require(number in text, f"the ValueError does not name input {number}: {text}")
    require(after == [[3.0] * 3] * 2, f"after refused calls 1 + 2 is {after}")


def diagnosed(fault: str) -> str:
    """Driver: graph_fault of a runner made here: a running sum with one mistake."""
    import torch

    from labkit.graph_simulator import simulated_capture

    class Runner:
        def __init__(self):
            self.value, self.row = torch.zeros(3), torch.zeros(1, dtype=torch.int64)
            self.log, self.weight = torch.zeros(9, 3), 1.0

        def tensors(self):
            return {"value": self.value, "row": self.row, "log": self.log}

        def fill(self, x, position):
            if fault == "uncopied input":
                self.row = torch.tensor([position])
            else:
                self.row.fill_(position)
            self.value.copy_(x)
            self.weight = 1.0 + position if fault == "baked number" else 1.0

        def step(self):
            if fault == "host read" and bool((self.value > 0).any()):
                self.value.mul_(1.0)
            if fault == "allocation inside":
                self.log = self.log.index_copy(0, self.row, self.value[None])
            else:
                self.log.index_copy_(0, self.row, self.value[None])
            return (self.log.sum(0) * self.weight,)

    tokens = [torch.full((3,), float(n + 1)) for n in range(3)]
    return str(graph_fault(Runner, simulated_capture, tokens))


@hidden_check(LAB, "graph_fault")
def other_runners(remote: Remote) -> None:
    for fault in ("none", "uncopied input", "allocation inside", "host read", "baked number"):
        got = remote.call(diagnosed, fault)
        require(got == fault, f"a running sum with the mistake {fault!r} is diagnosed as {got!r}")


def attended(max_model_len: int, block_size: int, lengths: list[int]) -> list:
    """Driver: FixedCapturedDecode on one row of each length, beside plain attention."""
    import torch

    from labkit.graph_simulator import simulated_capture

    generator = torch.Generator().manual_seed(max_model_len)
    cache = torch.randn(40, block_size, 6, generator=generator)
    made = FixedCapturedDecode(2, max_model_len, block_size, cache, simulated_capture)
    got, want = [], []
    for length in lengths:
        order = torch.randperm(40, generator=generator).tolist()
        count = -(-length // block_size)
        q = torch.randn(2, 6, generator=generator)
        out = made(q, [order[:count], order[count : count + 1]], [length, 1])
        keys = cache[order[:count]].flatten(0, 1)[:length]
        got.append(out[0].tolist())
        want.append(((keys @ q[0]).softmax(0) @ keys).tolist())
    return [got, want]


@hidden_check(LAB, "fixed_captured_decode")
def all_lengths(remote: Remote) -> None:
    for max_model_len, block_size in ((32, 8), (30, 8), (9, 3), (64, 2)):
        lengths = [max_model_len + 1, 1, max_model_len, max_model_len + 1]
        got, want = remote.call(attended, max_model_len, block_size, lengths)
        for length, one, other in zip(lengths, got, want, strict=True):
            require(
                np.allclose(one, other, atol=1e-4),
                f"max_model_len {max_model_len}, blocks of {block_size}: wrong when attending to {length} tokens",
            )
