"""Contenders timed side by side on one device: what may differ between them is the code, nothing else.

Each contender's calls are captured into one CUDA graph, so that no launch waits for the host; the calls rotate through
input sets that together exceed the L2 cache, so that every call reads device memory; the contenders take turns in an
order drawn anew each round, so that a drifting clock favours none. What counts is the median over the rounds.
"""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

Call = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Timing:
    """seconds: median time of one call. spread: interquartile range of the rounds over their median."""

    seconds: float
    spread: float


def race(contenders: Mapping[str, Sequence[Call]], *, rounds: int = 9, seed: int = 0) -> dict[str, Timing]:
    """Time contenders against each other.

    contenders: name -> its calls, one per input set; all are captured into one graph, in this order. Use sets enough
    that their bytes exceed the L2 cache several times.
    Raises RuntimeError if there is no CUDA device.
    """
    if not torch.cuda.is_available():
        raise RuntimeError("timing needs a CUDA device, and there is none")
    graphs = {name: _capture(calls) for name, calls in contenders.items()}
    samples: dict[str, list[float]] = {name: [] for name in contenders}
    order = list(contenders)
    shuffle = random.Random(seed).shuffle
    for warm_up in (True, *[False] * rounds):
        shuffle(order)
        for name in order:
            seconds = _replay(graphs[name]) / len(contenders[name])
            if not warm_up:
                samples[name].append(seconds)
    return {name: _summary(times) for name, times in samples.items()}


def _capture(calls: Sequence[Call]) -> torch.cuda.CUDAGraph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # compiles kernels and fills caches, which a capture must not see
        calls[0]()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph


def _replay(graph: torch.cuda.CUDAGraph) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    begin.record()
    graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def _summary(times: Sequence[float]) -> Timing:
    median = statistics.median(times)
    low, _, high = statistics.quantiles(times, n=4)
    return Timing(median, (high - low) / median)
