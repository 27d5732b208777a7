"""Which CUDA graph vLLM will run a batch in, and which graphs are worth capturing.

`Dispatcher` asks vLLM's own dispatcher (vllm.v1.cudagraph_dispatcher), which is plain Python and needs no GPU. `fit`
chooses `cudagraph_capture_sizes` for the batches that a server really sees: vLLM's own list serves any traffic, with a
graph at every eighth token, and what lies between two of its sizes is computed for nobody.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np

from labkit.serve.values import is_number, whole
from labkit.workload import Request

MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


@dataclass(frozen=True)
class Dispatch:
    """What becomes of a batch. mode: "NONE", "PIECEWISE" or "FULL". padded: tokens (rows) that are computed."""

    mode: str
    padded: int


class Dispatcher:
    """vLLM's dispatcher for one configuration.

    mode: one of MODES. sizes: `cudagraph_capture_sizes`, in tokens. max_num_seqs: of the scheduler. query_len: tokens
    of a request in a decode step, 1 without speculative decoding.

    Raises ValueError for an unknown mode or numbers that are no whole ones above 0, ImportError without vLLM.
    """

    def __init__(self, mode: str, sizes: Iterable[int], *, max_num_seqs: int, query_len: int = 1) -> None:
        if mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, and is {mode!r}")
        most, each = whole("max_num_seqs", max_num_seqs), whole("query_len", query_len)
        self.mode = mode
        self.sizes = _checked_sizes(sizes)
        if mode != "NONE" and not self.sizes:
            raise ValueError(f"sizes: mode {mode} captures graphs, and no size is given")
        from vllm.config import CompilationConfig, CompilationMode, CUDAGraphMode
        from vllm.v1.cudagraph_dispatcher import CudagraphDispatcher

        graph_mode = CUDAGraphMode[mode]
        compilation = CompilationConfig(
            mode=CompilationMode.VLLM_COMPILE, cudagraph_mode=graph_mode, cudagraph_capture_sizes=list(self.sizes),
            max_cudagraph_capture_size=max(self.sizes, default=0),
        )  # fmt: skip
        compilation.set_splitting_ops_for_v1(all2all_backend="naive")
        compilation.post_init_cudagraph_sizes()
        config: Any = SimpleNamespace(
            compilation_config=compilation, num_speculative_tokens=each - 1, lora_config=None,
            scheduler_config=SimpleNamespace(max_num_seqs=most), speculative_config=None,
        )  # fmt: skip
        self._dispatcher = CudagraphDispatcher(config)
        self._dispatcher.initialize_cudagraph_keys(graph_mode, each)

    @property
    def graphs(self) -> list[Dispatch]:
        """The graphs that are captured at start-up, in the order of their capture: the largest first."""
        return [
            Dispatch(mode.name, shape.num_tokens)
            for mode, shapes in self._dispatcher.get_capture_descs()
            for shape in shapes
        ]

    def dispatch(self, num_tokens: int, *, decode: bool) -> Dispatch:
        """The graph for a batch. decode: every request brings `query_len` tokens; a batch with a prefill is mixed."""
        mode, shape = self._dispatcher.dispatch(whole("num_tokens", num_tokens), uniform_decode=decode)
        return Dispatch(mode.name, shape.num_tokens)

    def padded_share(self, decode_batches: Mapping[int, int]) -> float:
        """Share of the computed rows that belong to no request. decode_batches: requests in a step -> steps."""
        rows = {batch: self.dispatch(batch, decode=True).padded for batch in decode_batches}
        return _padded_share(decode_batches, rows)


def stock_sizes(max_num_seqs: int, max_num_batched_tokens: int = 8192) -> list[int]:
    """The `cudagraph_capture_sizes` that vLLM chooses by itself, from its own rule. ImportError without vLLM."""
    most, tokens = whole("max_num_seqs", max_num_seqs), whole("max_num_batched_tokens", max_num_batched_tokens)
    from vllm.config import CompilationConfig, CUDAGraphMode, VllmConfig

    compilation = CompilationConfig(cudagraph_mode=CUDAGraphMode.FULL_AND_PIECEWISE)
    config: Any = SimpleNamespace(
        compilation_config=compilation, model_config=SimpleNamespace(enforce_eager=False), speculative_config=None,
        scheduler_config=SimpleNamespace(max_num_seqs=most, max_num_batched_tokens=tokens),
        parallel_config=SimpleNamespace(tensor_parallel_size=1), performance_mode="balanced",
        num_speculative_tokens=0, uniform_decode_query_len=1,
    )  # fmt: skip
    VllmConfig._set_cudagraph_sizes(config)
    assert compilation.cudagraph_capture_sizes is not None
    return list(compilation.cudagraph_capture_sizes)


def pad(batch: int, sizes: Sequence[int]) -> int:
    """The smallest size that holds the batch; the batch itself where none does, since it then runs without a graph."""
    return min((size for size in sizes if size >= batch), default=batch)


def padded_share(batches: Mapping[int, int], sizes: Sequence[int]) -> float:
    """Share of the computed rows that belong to no request, if these sizes are captured. batches: as in `fit`."""
    return _padded_share(batches, {batch: pad(batch, sizes) for batch in batches})


@dataclass(frozen=True)
class Budget:
    """What capturing may cost. sizes: most sizes. memory_bytes, seconds: of all graphs together, None for no limit.

    bytes_per_graph, seconds_per_graph: of one graph; vLLM's log states both for all of them ("Graph capturing finished
    in ... secs, took ... GiB"). graphs_per_size: 2 under FULL_AND_PIECEWISE, which captures each size twice. ValueError
    names what is no such number, and a limit without the cost of one graph, which would limit nothing.
    """

    sizes: int
    memory_bytes: float | None = None
    seconds: float | None = None
    bytes_per_graph: float = 0.0
    seconds_per_graph: float = 0.0
    graphs_per_size: int = 2

    def __post_init__(self) -> None:
        whole("sizes", self.sizes, 0)
        whole("graphs_per_size", self.graphs_per_size)
        for of_all, of_one in (("memory_bytes", "bytes_per_graph"), ("seconds", "seconds_per_graph")):
            limit, each = getattr(self, of_all), getattr(self, of_one)
            for name, value in ((of_all, 0 if limit is None else limit), (of_one, each)):
                if not (is_number(value) and value >= 0):
                    raise ValueError(f"{name} must be a number of at least 0, and is {value!r}")
            if limit is not None and each == 0:
                raise ValueError(f"{of_one} must be given where {of_all} is a limit, else it limits nothing")

    @property
    def most_sizes(self) -> int:
        """Sizes that fit all three limits."""
        most: float = self.sizes
        for limit, each in ((self.memory_bytes, self.bytes_per_graph), (self.seconds, self.seconds_per_graph)):
            if limit is not None and each > 0:
                most = min(most, limit / (each * self.graphs_per_size) + 1e-9)  # 2.0 // 0.2 would be 9
        return int(most)


@dataclass(frozen=True)
class Fit:
    """sizes: to capture, ascending. padded: share of the computed rows that belong to no request."""

    sizes: tuple[int, ...]
    padded: float


def fit(
    batches: Mapping[int, int], budget: Budget, *, keep: Iterable[int] = (), most_padded: float | None = None
) -> Fit:
    """The capture sizes that waste the fewest rows on this traffic.

    batches: tokens in a step -> how many steps had so many; each is served by a graph, the largest one as well.
    budget: what capturing may cost. keep: sizes to have in any case, for batches that are rare in this traffic and
    shall not be padded all the same. most_padded: as few sizes as keep the padded share at or under this, if the budget
    allows it; None for the least padding that the budget buys.

    The best k sizes follow from the best k - 1 (dynamic programming over the distinct batches, each of which either is
    a size or is padded to the next one). Raises ValueError for empty traffic, a batch, a size or a count under 1, or a
    budget that buys fewer sizes than these need.
    """
    if not isinstance(batches, Mapping) or not batches:
        raise ValueError(f"batches: expected tokens -> steps, at least one entry, and got {batches!r}")
    batches = {whole("batches: tokens", n): whole("batches: steps", times) for n, times in batches.items()}
    if not isinstance(budget, Budget):
        raise ValueError(f"budget must be a Budget, and is {budget!r}")
    if most_padded is not None and not (is_number(most_padded) and 0 <= most_padded <= 1):
        raise ValueError(f"most_padded must be a share from 0 to 1, or None, and is {most_padded!r}")
    kept = _checked_sizes(keep, "keep")
    steps = {**dict.fromkeys(kept, 0), **batches}
    least = len({*kept, max(steps)})
    most = min(budget.most_sizes, len(steps))
    if most < least:
        raise ValueError(f"budget: buys {most} sizes, and {least} are needed; allow more sizes, memory or seconds")
    found = None
    for sizes in _best_sizes(steps, kept, most):
        if len(sizes) >= least:
            found = Fit(sizes, padded_share(batches, sizes))
            if most_padded is not None and found.padded <= most_padded:
                break
    assert found is not None
    return found


def _best_sizes(batches: Mapping[int, int], kept: Sequence[int], most: int) -> Iterator[tuple[int, ...]]:
    """The sizes that compute the fewest rows, if there may be 1, 2, ... `most` of them. Fewer than kept ones: any."""
    size = np.array(sorted(batches), dtype=np.int64)
    rows = _rows_by_run(size, np.array([batches[int(s)] for s in size], dtype=np.int64)).astype(float)
    for n in np.flatnonzero(np.isin(size, kept)):
        rows[: n + 1, n + 1 :] = np.inf  # a kept size is padded to no other
    best = rows[0]  # [j]: rows computed for the batches up to j, with j the last size
    before_last: list[np.ndarray] = []
    for _ in range(most):
        chain = [len(size) - 1]
        for choice in reversed(before_last):
            chain.append(int(choice[chain[-1]]))
        yield tuple(int(size[j]) for j in reversed(chain))
        # With i the last but one, the batches i + 1 .. j are padded to j. i < j: the triangle above the diagonal.
        through = np.full(rows.shape, np.inf)
        above = np.triu_indices(len(size), 1)
        through[above] = best[above[0]] + rows[above[0] + 1, above[1]]
        before_last.append(through.argmin(axis=0))
        best = through.min(axis=0)


def decode_batches(requests: Sequence[Request], max_num_seqs: int, steps_per_second: float) -> Counter[int]:
    """How many requests decode together in each step, if this trace is served: requests -> steps.

    A request is admitted in order of arrival when fewer than `max_num_seqs` run; it decodes output_len - 1 times, since
    its prefill gives the first token. Steps take 1 / steps_per_second seconds each.
    """
    return Counter(step.decoding for step in _serve(requests, max_num_seqs, steps_per_second) if step.decoding)


def mixed_batches(requests: Sequence[Request], max_num_seqs: int, steps_per_second: float) -> Counter[int]:
    """How many tokens the steps have in which prompts join those that decode: tokens -> steps.

    Served as in `decode_batches`; a prompt is computed whole, in the step that admits it.
    """
    return Counter(step.joined for step in _serve(requests, max_num_seqs, steps_per_second) if step.joined)


class _Step(NamedTuple):
    """decoding: requests that decode, new ones among them. joined: tokens, if prompts are computed first; else 0."""

    decoding: int
    joined: int


def _serve(requests: Sequence[Request], max_num_seqs: int, steps_per_second: float) -> Iterator[_Step]:
    whole("max_num_seqs", max_num_seqs)
    if not (is_number(steps_per_second) and 0 < steps_per_second < float("inf")):
        raise ValueError(f"steps_per_second must be a number above 0, and is {steps_per_second!r}")
    if not all(is_number(request.arrival) and request.arrival < float("inf") for request in requests):
        raise ValueError("requests: each must have an arrival in seconds")
    waiting = sorted(requests, key=lambda request: request.arrival)
    left: list[int] = []
    step, following = 0, 0
    while following < len(waiting) or left:
        now = step / steps_per_second
        if not left and waiting[following].arrival > now:
            step = max(step + 1, int(np.ceil(waiting[following].arrival * steps_per_second)))  # as rounding may have it
            continue
        others, prompts = len(left), 0
        while following < len(waiting) and len(left) < max_num_seqs and waiting[following].arrival <= now:
            left.append(waiting[following].output_len - 1)
            prompts += waiting[following].prompt_len
            following += 1
        left = [tokens for tokens in left if tokens > 0]
        yield _Step(len(left), prompts + others if prompts else 0)
        left = [tokens for tokens in (tokens - 1 for tokens in left) if tokens > 0]
        step += 1


def _rows_by_run(size: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """[i, j]: rows computed for the batches i .. j if they are all padded to size j; 0 below the diagonal."""
    before = np.concatenate([[0], np.cumsum(steps)])
    runs = before[None, 1:] - before[:-1, None]
    return np.triu(runs * size[None, :])


def _padded_share(steps: Mapping[int, int], rows: Mapping[int, int]) -> float:
    computed = sum(steps[batch] * rows[batch] for batch in steps)
    used = sum(steps[batch] * batch for batch in steps)
    return 1 - used / computed if computed else 0.0


def _checked_sizes(sizes: Iterable[int], name: str = "sizes") -> tuple[int, ...]:
    if isinstance(sizes, str) or not isinstance(sizes, Iterable):
        raise ValueError(f"{name} must be numbers of tokens, and is {sizes!r}")
    return tuple(sorted({whole(f"each of {name}", size) for size in sizes}))
