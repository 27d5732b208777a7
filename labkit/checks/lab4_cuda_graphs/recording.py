"""Capture and replay: a step with static buffers, and the mistakes that a graph punishes."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from labkit import device
from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab4_cuda_graphs.cases import CountedCapture, capture_here, random, refused
from labkit.graph_simulator import launches

LAB = "lab4_cuda_graphs"

captured_step = Question(
    "captured_step", LAB, "every call replays on that call's inputs, and its result is the caller's"
)


def _scaled_sum(x: torch.Tensor, ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Four launches on three inputs, one of them of whole numbers."""
    return (x * 2 + table.index_select(0, ids)).cumsum(1)


def _inputs(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, 5, (3,), generator=torch.Generator().manual_seed(seed)).to(device.name())
    return random(3, 4, seed=seed), ids, random(5, 4, seed=seed + 1)


def _made(answer) -> tuple[Callable, CountedCapture]:
    capture = CountedCapture()
    return answer(_scaled_sum, _inputs(0), capture), capture


def _same(got: object, want: torch.Tensor, look_at: str) -> None:
    require(isinstance(got, torch.Tensor), f"a call gives {type(got).__name__}, the output tensor was expected")
    assert isinstance(got, torch.Tensor)
    require(got.shape == want.shape, f"a call gives shape {tuple(got.shape)}, {tuple(want.shape)} expected")
    here, there = got.flatten()[:4].tolist(), want.flatten()[:4].tolist()
    require(torch.allclose(got, want, atol=1e-5), f"{look_at}: {here} instead of {there}")


@captured_step.invariant("a call gives what the step gives for its inputs", share=2, stops=True)
def _(answer) -> None:
    made, capture = _made(answer)
    look_at = "the graph read other values than this call's: is every input copied into the buffer that was captured?"
    for seed in (3, 5, 7):
        inputs = _inputs(seed)
        _same(made(*inputs), _scaled_sum(*inputs), look_at)
    require(
        capture.replays >= 3,
        f"{capture.replays} replays in three calls, one each expected: the graph is to do the work, not the step",
    )


@captured_step.invariant("one capture when it is made, one replay a call, and the step is not run again")
def _(answer) -> None:
    made, capture = _made(answer)
    require(capture.captures == 1, f"{capture.captures} captures when it is made, 1 expected")
    inputs = _inputs(3)
    eager = _count(lambda: _scaled_sum(*inputs))
    capture.replays = 0
    with launches() as log:
        before = log.count
        for _ in range(3):
            made(*inputs)
        every = log.count - before
    require(capture.captures == 1, f"{capture.captures} captures after three calls, 1 expected")
    require(capture.replays == 3, f"{capture.replays} replays in three calls, one each expected")
    on_gpu = device.tier() == "cuda"  # a graph's own work passes torch's dispatcher only in the simulator
    most = 3 * (3 + 2 + (0 if on_gpu else 2 * (eager + 1)))  # one copy to spare: the output may have a buffer too
    require(
        every <= most,
        f"{every} launches in three calls, at most {most} expected: three copies in, a replay, two copies out",
    )


def _count(work: Callable[[], object]) -> int:
    with launches() as log:
        work()
    return log.count


@captured_step.invariant("a result outlives the next call")
def _(answer) -> None:
    made, _ = _made(answer)
    first = made(*_inputs(3))
    kept = first.clone()
    made(*_inputs(5))
    look_at = "the graph writes its output to the same memory each time, so it must be copied out"
    require(torch.equal(first, kept), f"the first call's result changed with the second call: {look_at}")


@captured_step.invariant("the caller's tensors are neither kept nor changed")
def _(answer) -> None:
    capture, examples = CountedCapture(), _inputs(0)
    before = [x.clone() for x in examples]
    made = answer(_scaled_sum, examples, capture)
    made(*_inputs(5))
    for n, (x, y) in enumerate(zip(examples, before, strict=True)):
        require(
            torch.equal(x, y), f"a call wrote into example {n}, which is the caller's: buffers need memory of their own"
        )


@captured_step.invariant("another shape or dtype is refused by the input's number, and nothing is replayed", share=2)
def _(answer) -> None:
    made, capture = _made(answer)
    x, ids, table = _inputs(3)
    want = made(x, ids, table)
    capture.replays = 0
    wrong = [
        ("0", (x[:1], ids, table)),  # copy_ would repeat it for all rows
        ("0", (-x[None], ids, table)),  # as many elements
        ("1", (-x, ids.repeat(2), table)),
        ("2", (-x, ids, table.double())),
    ]
    for number, inputs in wrong:
        what = f"input {number} of shape {tuple(inputs[int(number)].shape)} and {inputs[int(number)].dtype}"
        refused(functools.partial(made, *inputs), number, what)
    refused(lambda: made(x, ids), "2", "a call with 2 inputs instead of 3")
    require(capture.replays == 0, f"{capture.replays} replays in refused calls, 0 expected: check before you copy")
    _same(made(x, ids, table), want, "after refused calls the same inputs give something else")


graph_fault = Question("graph_fault", LAB, "each mistake is told from the others by experiment", launches_kernels=True)

DIM = 4


class Sound:
    """One sequence's decode step, right: it remembers x, and attends to what it has seen."""

    def __init__(self, max_len: int):
        where = device.name()
        self.x, self.cache = torch.zeros(DIM, device=where), torch.zeros(max_len, DIM, device=where)
        self.position = torch.zeros(1, dtype=torch.int64, device=where)

    def tensors(self) -> dict[str, torch.Tensor]:
        return {"x": self.x, "cache": self.cache, "position": self.position}

    def fill(self, x: torch.Tensor, position: int) -> None:
        self.x.copy_(x)
        self.position.fill_(position)

    def step(self) -> tuple[torch.Tensor]:
        self.cache.index_copy_(0, self.position, self.x[None])
        return (self.attend(self.cache, torch.arange(len(self.cache), device=self.x.device) <= self.position),)

    def attend(self, rows: torch.Tensor, seen: torch.Tensor) -> torch.Tensor:
        weights = (rows * self.x).sum(1).masked_fill(~seen, -1e9).softmax(0)
        return (weights[:, None] * rows).sum(0)


class NewInput(Sound):
    """Binds the name of the input buffer to the caller's tensor."""

    def fill(self, x: torch.Tensor, position: int) -> None:
        self.x = x.clone()
        self.position.fill_(position)


class NewPosition(Sound):
    """The same mistake in the input that looks like a number."""

    def fill(self, x: torch.Tensor, position: int) -> None:
        self.x.copy_(x)
        self.position = torch.tensor([position], device=self.x.device)


class GrowingCache(Sound):
    """Keeps what it has seen in a new tensor each step."""

    def __init__(self, max_len: int):
        super().__init__(max_len)
        self.cache = self.cache[:0]

    def step(self) -> tuple[torch.Tensor]:
        self.cache = torch.cat([self.cache, self.x[None]])
        return (self.attend(self.cache, torch.ones(len(self.cache), dtype=torch.bool, device=self.x.device)),)


class ReadsItem(Sound):
    """Asks the device for the position in the middle of the step."""

    def step(self) -> tuple[torch.Tensor]:
        last = int(self.position.item())
        self.cache.index_copy_(0, self.position, self.x[None])
        rows = self.cache[: last + 1]
        return (self.attend(rows, torch.ones(len(rows), dtype=torch.bool, device=self.x.device)),)


class Branches(Sound):
    """Lets Python decide on a value of the device."""

    def step(self) -> tuple[torch.Tensor]:
        if self.x.abs().max() > 100:
            return (torch.zeros_like(self.x),)
        return super().step()


class BakedLength(Sound):
    """Uses a number of Python's that changes from step to step."""

    length = 1

    def fill(self, x: torch.Tensor, position: int) -> None:
        super().fill(x, position)
        self.length = position + 1

    def step(self) -> tuple[torch.Tensor]:
        self.cache.index_copy_(0, self.position, self.x[None])
        rows = self.cache[: self.length]
        return (self.attend(rows, torch.ones(len(rows), dtype=torch.bool, device=self.x.device)),)


RUNNERS = {
    "a sound runner": (Sound, "none"),
    "a runner whose fill makes a new x": (NewInput, "uncopied input"),
    "a runner whose fill makes a new position": (NewPosition, "uncopied input"),
    "a runner whose step grows its cache with torch.cat": (GrowingCache, "allocation inside"),
    "a runner whose step calls .item()": (ReadsItem, "host read"),
    "a runner whose step branches on a value": (Branches, "host read"),
    "a runner whose step slices by a number of Python's": (BakedLength, "baked number"),
}
for _runner, _ in RUNNERS.values():
    _runner.__name__ = _runner.__qualname__ = "Runner"  # what it does is to be looked at, not what it is called


def _classifies(what: str, runner: type, want: str) -> None:
    share = 2.0 if want in ("none", "baked number") else 1.0

    @graph_fault.invariant(f"{what}: {want}", share=share)
    def _(answer) -> None:
        tokens = [random(DIM, seed=s) for s in range(4)]
        got = answer(lambda: runner(8), capture_here(), tokens)
        if isinstance(got, str) and got == want:
            return
        raise Failed(f"{what} is diagnosed as {got!r}, {want!r} expected: {LOOK[want]}")


LOOK = {
    "none": "replays and eager steps give the same, and no tensor moves",
    "uncopied input": "which tensor of the runner is another one after fill?",
    "allocation inside": "which tensor of the runner is another one after step?",
    "host read": "what does the capture say?",
    "baked number": "no tensor moves and yet replays and eager steps differ: compare them at more than the first token",
}
for _what, (_class, _want) in RUNNERS.items():
    _classifies(_what, _class, _want)

QUESTIONS = [captured_step, graph_fault]
