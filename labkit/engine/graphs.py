"""Capture and replay: torch.cuda.CUDAGraph on a GPU, and on a CPU a simulator under the same two laws.

A graph is a recording of launches with their arguments: the shapes and the addresses of the moment it was made. What
should differ between replays must be data in buffers that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Step = Callable[[], tuple[torch.Tensor, ...]]

HOST_READS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "lift_fresh")
"""What makes the host wait for values of a tensor, or brings a host value in: refused in a capture."""
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "detach", "alias")


class CaptureError(RuntimeError):
    """The work cannot be captured. Nothing was recorded."""


@dataclass(frozen=True)
class Graph:
    """A recording. replay: submits all of it again, in one launch.

    outputs: the buffers that every replay writes, until another graph of the pool is replayed.
    """

    replay: Callable[[], None]
    outputs: tuple[torch.Tensor, ...]


Capture = Callable[[Step], Graph]
"""Runs a step to warm it up, then records it."""


class CudaRecorder:
    """CUDA graphs out of one pool: the first capture sizes it, so capture the largest first."""

    def __init__(self, warmups: int = 2):
        self._pool: Any = None
        self._warmups = warmups

    def __call__(self, step: Step) -> Graph:
        """Warm up on a side stream (first launches compile and allocate, which a capture forbids), then record."""
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(self._warmups):
                step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            outputs = step()
        self._pool = graph.pool() if self._pool is None else self._pool
        return Graph(graph.replay, outputs)


class LaunchLog(TorchDispatchMode):
    """Counts and, if asked to, records what the work inside launches: every torch operation that is not a view.

    Kernels of other kinds take part through `as_launch`.
    """

    def __init__(self, record: bool = False):
        super().__init__()
        self.count = 0
        self.tape: list[tuple[Callable[[], Any], tuple[torch.Tensor, ...]]] = []
        self._record = record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.split("::")[1]
        if self._record and _reads_host(name, args):
            raise CaptureError(f"{name} inside a capture: a graph cannot wait for the host, nor copy a host value in")
        out = func(*args, **kwargs)
        writes = func._schema.is_mutable
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = _tensors(out)
        view = not writes and any(t.untyped_storage().data_ptr() in inputs for t in made)
        if not view and name not in NO_LAUNCH:
            self.add(lambda: func(*args, **kwargs), () if writes else made)
        return out

    def add(self, again: Callable[[], Any], outputs: tuple[torch.Tensor, ...]) -> None:
        """Count a launch; `again` repeats it and gives what belongs into `outputs`."""
        self.count += 1
        if self._record:
            self.tape.append((again, outputs))


_logs: list[LaunchLog] = []


@contextmanager
def launches(record: bool = False) -> Iterator[LaunchLog]:
    """Count (and record) the launches of the block."""
    log = LaunchLog(record)
    _logs.append(log)
    try:
        with log:
            yield log
    finally:
        _logs.pop()


def as_launch(kernel: Callable[[], Any]) -> None:
    """Run `kernel`, which writes into tensors it was given, as one launch; in the interpreter it is many operations."""
    if not _logs:
        kernel()
        return
    with torch.utils._python_dispatch._disable_current_modes():
        kernel()
    _logs[-1].add(kernel, ())


def simulated_capture(step: Step) -> Graph:
    """A graph on the CPU: the same operations on the same memory, whatever the caller's variables now are.

    CaptureError if `step` reads a tensor's value on the host.
    """
    step()
    with launches(record=True) as log:
        outputs = step()

    def replay() -> None:
        for again, made in log.tape:
            new = _tensors(again())
            for old, value in zip(made, new if made else (), strict=True):
                old.copy_(value)

    return Graph(replay, outputs)


def _reads_host(name: str, args: Any) -> bool:
    # The length of x[mask] depends on the mask's values.
    masked = name == "index" and any(t.dtype in (torch.bool, torch.uint8) for t in _tensors(args[1]))
    return masked or name in HOST_READS


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))


def default_sizes(largest: int) -> tuple[int, ...]:
    """Batch sizes to capture: 1, 2, 4, every 8 up to 256, every 16 beyond, and always `largest` itself.

    A largest batch without a graph of its own would fall off a cliff.
    """
    ladder = [1, 2, 4, *range(8, min(largest, 256) + 1, 8), *range(272, largest + 1, 16)]
    return tuple(sorted({size for size in ladder if size <= largest} | {largest}))


class GraphLadder:
    """One graph for each captured batch size; a batch runs in the smallest that holds it.

    sizes: of batches. make_step: for a size, the work on the first `size` rows of the static buffers. capture: None
    runs the work itself at the same padded sizes. ValueError for sizes below 1 or none at all.
    """

    def __init__(self, sizes: Sequence[int], make_step: Callable[[int], Step], capture: Capture | None):
        if not sizes or min(sizes) < 1:
            raise ValueError(f"capture_sizes must hold batch sizes of at least 1, and are {tuple(sizes)}")
        self.sizes = tuple(sorted(set(sizes)))
        self._make_step = make_step
        self.captured = capture is not None
        self._graphs: dict[int, Graph] = {}
        if capture is not None:
            for size in reversed(self.sizes):
                self._graphs[size] = capture(make_step(size))

    def size_for(self, batch: int) -> int | None:
        """The smallest size that holds the batch; None if no size does, and it has to run without a graph."""
        return next((size for size in self.sizes if size >= batch), None)

    def run(self, size: int) -> tuple[torch.Tensor, ...]:
        """Run one size on what the static buffers now hold."""
        if not self.captured:
            return self._make_step(size)()
        self._graphs[size].replay()
        return self._graphs[size].outputs
