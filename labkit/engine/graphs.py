"""Capture and replay: torch.cuda.CUDAGraph on a GPU, labkit.graph_simulator on a CPU, and the ladder of batch sizes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from labkit.graph_simulator import CaptureError, Graph, Step, as_launch, launches, simulated_capture

__all__ = [
    "Capture", "CaptureError", "CudaRecorder", "Graph", "GraphLadder", "Step", "as_launch", "default_sizes", "launches",
    "simulated_capture",
]  # fmt: skip

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
