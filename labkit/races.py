"""A kernel beside its peers in one run on one device. Only ratios are kept: seconds differ from machine to machine.

Contestants take turns in an order drawn anew each round, so that a drifting clock favours none, and each finds a cold
cache. A ratio is taken within each round; what counts is the median over the rounds, with an interval around it, and
where that interval is too wide to say anything, the result says so.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from labkit import device

CPU_CACHE_BYTES = 64 << 20  # at least the last-level cache of most CPUs


@dataclass(frozen=True)
class Ratio:
    """How many times as fast one contestant is as another: median, and an interval that holds it with about 95 %."""

    value: float
    low: float
    high: float
    max_spread: float

    @property
    def spread(self) -> float:
        """Width of the interval over the median."""
        return (self.high - self.low) / self.value

    @property
    def conclusive(self) -> bool:
        """False where the interval is wider than `max_spread`: then no credit is given or taken."""
        return self.spread <= self.max_spread

    def __str__(self) -> str:
        interval = f"{self.low:.2f} to {self.high:.2f}"
        return f"{self.value:.2f}x ({interval})" if self.conclusive else f"inconclusive ({interval}x)"


@dataclass(frozen=True)
class Race:
    """seconds: of each round, by contestant, rounds aligned. baseline: the contestant that others are compared with."""

    seconds: dict[str, tuple[float, ...]]
    baseline: str
    device: str
    max_spread: float = 0.2

    def ratio(self, name: str, over: str | None = None) -> Ratio:
        """How many times as fast `name` is as `over` (the baseline); above 1 is faster. KeyError if unknown."""
        for asked in (name, over or self.baseline):
            if asked not in self.seconds:
                raise KeyError(f"no contestant {asked!r}; there are: {', '.join(self.seconds)}")
        pairs = zip(self.seconds[over or self.baseline], self.seconds[name], strict=True)
        ratios = sorted(theirs / ours for theirs, ours in pairs)
        low, high = _median_ranks(len(ratios))
        return Ratio(statistics.median(ratios), ratios[low], ratios[high], self.max_spread)

    def __str__(self) -> str:
        lines = [
            f"on {self.device}, {len(self.seconds[self.baseline])} rounds, speed as a multiple of {self.baseline}:"
        ]
        for name, times in self.seconds.items():
            lines.append(f"  {name:<24} {statistics.median(times) * 1e6:>12,.1f} us   {self.ratio(name)}")
        return "\n".join(lines)

    def chart(self) -> Any:
        """A bar for each contestant, as a matplotlib figure."""
        from labkit import plots

        return plots.race_chart(self)


def race(
    contestants: Mapping[str, Callable[[], object]],
    *,
    baseline: str | None = None,
    rounds: int = 15,
    warm_up: int = 2,
    cold: bool = True,
    max_spread: float = 0.2,
    seed: int = 0,
) -> Race:
    """Time functions without arguments against each other: all on the GPU where there is one, else on the CPU.

    baseline: the first contestant unless named. cold: empty the L2 cache before each call (on a CPU, as far as writing
    64 MiB does it). Interpreted Triton kernels run too, but their time says nothing about a GPU: count their bytes.
    An error of a contestant is raised as it is. ValueError for less than two contestants or five rounds.
    """
    names = list(contestants)
    if len(names) < 2:
        raise ValueError(f"contestants: a race takes at least two, got {len(names)}")
    if rounds < 5:
        raise ValueError(f"rounds must be at least 5 to say how sure a median is, and is {rounds}")
    if baseline is not None and baseline not in contestants:
        raise ValueError(f"baseline: no contestant {baseline!r}; there are: {', '.join(names)}")
    timed, shuffle = _timer(cold), random.Random(seed).shuffle
    seconds: dict[str, list[float]] = {name: [] for name in names}
    order = names.copy()
    for number in range(warm_up + rounds):
        shuffle(order)
        for name in order:
            took = timed(contestants[name])
            if number >= warm_up:
                seconds[name].append(took)
    return Race({n: tuple(t) for n, t in seconds.items()}, baseline or names[0], device.model(), max_spread)


def _timer(cold: bool) -> Callable[[Callable[[], object]], float]:
    if device.tier() == "cuda":
        return _cuda_timer(cold)
    buffer = torch.empty(CPU_CACHE_BYTES if cold else 0, dtype=torch.uint8)

    def timed(call: Callable[[], object]) -> float:
        buffer.fill_(1)
        began = time.perf_counter()
        call()
        return time.perf_counter() - began

    return timed


def _cuda_timer(cold: bool) -> Callable[[Callable[[], object]], float]:
    cache = torch.cuda.get_device_properties().L2_cache_size
    buffer = torch.empty(4 * cache if cold else 0, dtype=torch.uint8, device="cuda")

    def timed(call: Callable[[], object]) -> float:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        buffer.zero_()  # still running while the call is launched, which hides the launch
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    return timed


def _median_ranks(count: int) -> tuple[int, int]:
    """Indices of the sorted samples that enclose the true median with at least 95 %, or all where too few are there."""
    tail, rank = 0.0, 0
    while rank < count // 2:
        tail += math.comb(count, rank) / 2**count
        if tail > 0.025:
            break
        rank += 1
    return max(rank - 1, 0), count - max(rank, 1)
