"""A simulator of CUDA graphs on a CPU, under the same two laws: fixed shapes, fixed addresses; and a count of launches.

A graph is a recording of launches with their arguments: the shapes and the addresses of the moment it was made. What
should differ between replays must be data in buffers that stay where they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

Step = Callable[[], tuple[torch.Tensor, ...]]
"""Work that a graph records; gives the tensors it leaves its results in."""

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
        now, with_names = _as_now((args, kwargs)) if self._record else (args, kwargs)
        out = func(*args, **kwargs)
        writes = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags
        inputs = {t.untyped_storage().data_ptr() for t in _tensors((args, kwargs))}
        made = _tensors(out)
        view = not writes and any(t.untyped_storage().data_ptr() in inputs for t in made)
        if not view and name not in NO_LAUNCH:
            self.add(lambda: func(*now, **with_names), () if writes else _as_now(made))
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


def as_launch(kernel: Callable[[], Any], count: int = 1) -> Any:
    """Run `kernel` as one launch, or `count`; in the interpreter it is many operations. Gives what it gives.

    It may only read and write memory that stays where it is, but for what it returns: a replay copies that into the
    tensors of the capture.
    """
    if not _logs:
        return kernel()
    with torch.utils._python_dispatch._disable_current_modes():
        out = kernel()
    _logs[-1].add(kernel, _tensors(out))
    _logs[-1].count += count - 1
    return out


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


def _as_now(tree: Any) -> Any:
    """The same memory under other tensor objects: `squeeze_` and its like change the shape of the object itself."""
    return tree_map_only(torch.Tensor, torch.Tensor.detach, tree)


def _tensors(tree: Any) -> tuple[torch.Tensor, ...]:
    return tuple(x for x in tree_leaves(tree) if isinstance(x, torch.Tensor))
