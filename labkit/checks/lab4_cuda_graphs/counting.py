"""Launches: which operations are some, how long they take to submit, and what a first one costs."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.graph_simulator import launches
from labkit.oplog import Op, decode_step, record_ops

LAB = "lab4_cuda_graphs"

count_launches = Question("count_launches", LAB, "what computes is counted, and what only looks or allocates is not")


@count_launches.invariant("the example of the docstring")
def _(answer) -> None:
    ops = [Op("view", (7,), (7,)), Op("empty", (), (8,)), Op("mm", (7, 9), (10,)), Op("add_", (10, 7), (10,), True)]
    _counts(answer, ops, 2, "a view, an empty, mm and add_")


@count_launches.invariant("a view of an argument launches nothing, whatever its name")
def _(answer) -> None:
    ops = [Op(name, (3,), (3,)) for name in ("transpose", "select", "unsqueeze", "view_as_real")]
    _counts(answer, ops, 0, "four views: their results lie in the memory of their argument")
    split = [Op("split", (4,), (4, 4, 4)), Op("reshape", (4,), (5,)), Op("contiguous", (4,), (4,))]
    _counts(answer, split, 1, "split and contiguous give views here, reshape copies")


@count_launches.invariant("a write into an argument is a launch, although its result lies in that memory")
def _(answer) -> None:
    ops = [Op("copy_", (1, 2), (1,), True), Op("index_copy_", (3, 4, 5), (3,), True), Op("zero_", (6,), (6,), True)]
    _counts(answer, ops, 3, "copy_, index_copy_ and zero_")


@count_launches.invariant("an allocation launches nothing, filling one does")
def _(answer) -> None:
    bare = [Op(name, (), (1,)) for name in ("empty", "empty_strided")] + [Op("empty_like", (2,), (1,))]
    _counts(answer, [*bare, Op("new_empty", (2,), (1,))], 0, "empty, empty_strided, empty_like, new_empty")
    filled = [Op(name, (), (1,)) for name in ("arange", "zeros", "full")]
    _counts(answer, filled, 3, "arange, zeros and full: something must write the values")


@count_launches.invariant("a decode step of the engine", share=2)
def _(answer) -> None:
    for layers in (1, 3):
        step = decode_step(layers)
        with launches() as log:
            ops = record_ops(step)
        _counts(answer, ops, log.count, f"a decode step of {layers} layers, {len(ops)} operations")


def _counts(answer, ops: list[Op], want: int, what: str) -> None:
    got = answer(list(ops))
    require(got == want, f"{what}: {got} launches counted, {want} expected")


launch_bound_until = Question(
    "launch_bound_until", LAB, "the batch at which kernels take as long as their launches is found"
)


@launch_bound_until.invariant("the example of the docstring")
def _(answer) -> None:
    got = answer(1000, 5e-6, 1e9, 1e9, 1e12)
    require(got == 3, f"batch {got}, 3 expected: 5 ms of launches, 2 ms of kernels at batch 1, 1 ms more for each row")


@launch_bound_until.invariant("weights are read once a step, KV once a row")
def _(answer) -> None:
    for launches_, weights, kv, want in (
        (1747, 1.2e9, 14.7e6, 2473),
        (2243, 16.4e9, 18.9e6, 1683),
        (400, 2e8, 1e7, 839),
    ):
        got = answer(launches_, 5e-6, weights, kv, 4.3e12)
        require(
            got == want,
            f"batch {got}, {want} expected, with {launches_} launches of 5 us, {weights:.3g} bytes of weights and"
            f" {kv:.3g} of KV a row at 4.3e12 bytes/s: which of them grows with the batch?",
        )


@launch_bound_until.invariant("a step whose kernels are never outrun gives 0")
def _(answer) -> None:
    got = answer(1, 5e-6, 16.4e9, 18.9e6, 4.3e12)
    require(
        got == 0, f"batch {got} with one launch of 5 us and 3.8 ms of weights, 0 expected: it never was launch-bound"
    )


@launch_bound_until.invariant("a tie is not launch-bound")
def _(answer) -> None:
    got = answer(8, 0.25, 1.0, 0.25, 1.0)
    require(got == 3, f"batch {got}, 3 expected: at batch 4 launches and kernels both take 2 s, which is a tie")


warm_up = Question("warm_up", LAB, "every bucket is warm before it serves, and its first run is accounted for")


class Machine:
    """A clock and a GPU whose first runs cost extra: the very first of all, each kernel variant's, each pool growth."""

    def __init__(self, context: float = 4.0, variant: float = 1.0, growth: float = 0.25) -> None:
        self.now = 0.0
        self.order: list[int] = []
        self._context, self._variant, self._growth = context, variant, growth
        self._variants: set[int] = set()
        self._pool = 0

    def clock(self) -> float:
        """Seconds."""
        return self.now

    def run(self, size: int) -> None:
        """Run a bucket: 1/8 s and 1/64 s a row, and what a first run costs."""
        self.now += 0.125 + size / 64 + (self._context if not self.order else 0)
        variant = max(16, 1 << (size - 1).bit_length())
        if variant not in self._variants:
            self._variants.add(variant)
            self.now += self._variant
        if size > self._pool:
            self.now += self._growth * (1 + len([s for s in self.order if s < size]))
            self._pool = size
        self.order.append(size)


def _warmed(answer, sizes: list[int], **costs: float) -> tuple[Machine, dict]:
    machine = Machine(**costs)
    got = answer(list(sizes), machine.run, machine.clock)
    require(isinstance(got, dict), f"a dict was expected, not {type(got).__name__}")
    return machine, got


@warm_up.invariant("every bucket is run")
def _(answer) -> None:
    machine, got = _warmed(answer, [1, 2, 4, 8, 16, 24])
    cold = sorted({1, 2, 4, 8, 16, 24} - set(machine.order))
    require(not cold, f"buckets {cold} were never run: the first request that needs one pays for it")
    require(set(got) == {1, 2, 4, 8, 16, 24}, f"seconds are given for buckets {sorted(got)}, all six expected")


@warm_up.invariant("the largest comes first, so that the pool grows once")
def _(answer) -> None:
    machine, _ = _warmed(answer, [4, 1, 32, 8])
    firsts = list(dict.fromkeys(machine.order))
    require(firsts == [32, 8, 4, 1], f"buckets were first run in the order {firsts}, [32, 8, 4, 1] expected")


@warm_up.invariant("a first run's extra is the first minus a later one of the same bucket", share=2)
def _(answer) -> None:
    _, got = _warmed(answer, [8, 32, 64, 1])
    want = {64: 5.25, 32: 1.0, 8: 1.0, 1: 0.0}
    for size, seconds in want.items():
        require(
            abs(got.get(size, -1.0) - seconds) < 1e-9,
            f"bucket {size} took {got.get(size)} s more at first, {seconds} expected: compare two runs of one bucket",
        )


@warm_up.invariant("each bucket is run twice in a row, and not more")
def _(answer) -> None:
    machine, _ = _warmed(answer, [16, 8, 4])
    apart = [one for one, other in zip(machine.order[::2], machine.order[1::2], strict=False) if one != other]
    require(not apart, f"runs in order {machine.order}: the second run of {apart[:1]} comes after another bucket's")
    often = {size: machine.order.count(size) for size in machine.order if machine.order.count(size) > 2}
    require(not often, f"start-up is waited for: runs by bucket {often}, two each are enough")


QUESTIONS = [count_launches, launch_bound_until, warm_up]
