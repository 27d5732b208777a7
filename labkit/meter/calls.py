"""Takes a call to a child process where it is counted, and brings back counts, result and what was written in place."""

from __future__ import annotations

import builtins
import os
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from labkit import cells, triton_internals
from labkit.meter import child
from labkit.meter.count import Count, Follow
from labkit.servers import Server, unpack
from labkit.source import standalone

# Where kernels are compiled in this process, they are interpreted in that one.
_interpreter = Server("labkit.meter.child:answer", {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""})


@dataclass(frozen=True)
class Call:
    """A call to be measured: `Call(function, (x, out), {"scale": 1.0})`."""

    function: Any
    args: tuple = ()
    kwargs: dict[str, Any] = field(default_factory=dict)


def measure(function: Any, *args: Any, **kwargs: Any) -> Count:
    """Count what `function(*args, **kwargs)` asks for: a function that launches Triton kernels.

    The arguments' tensors are changed in place as if the call had run here, on any device. Raises what the call raised
    (its type if that is a built-in one, else RuntimeError), TimeoutError after 45 s, and NotStandalone where the
    function refers to something that cannot be carried into another process.
    """
    return measure_many([Call(function, args, kwargs)])[0]


def measure_many(
    calls: Sequence[Call],
    *,
    shuffle: int | None = None,
    follow: Follow | None = None,
    conflicts: bool = False,
    timeout: float = 45.0,
) -> list[Count]:
    """Count several calls in one child process, one after another.

    shuffle: a seed; the programs of each launch then run in an order drawn from it, where the interpreter's own order
    would hide that they depend on one another. follow: a program whose accesses are kept element by element.
    conflicts: look for elements that two programs of a launch touch and one stores to. timeout: seconds for all calls
    together.
    """
    sources = [(standalone(c.function), triton_internals.plain_function(c.function).__name__) for c in calls]  # type: ignore[union-attr]
    arguments = [(c.args, c.kwargs) for c in calls]
    if _can_fork():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 on forking beside a kernel's threads
            reply = cells.forked(lambda: child.run_calls(sources, arguments, shuffle, follow, conflicts), timeout)
    else:
        reply = _interpreter.request(sources, arguments, shuffle, follow, conflicts, timeout, timeout=timeout)
    return [_take(call, part) for call, part in zip(calls, unpack(reply), strict=True)]


def _can_fork() -> bool:
    """A fork is safe where kernels are interpreted already and no CUDA context exists that it would inherit."""
    return triton_internals.interpreting() and hasattr(os, "fork") and not torch.cuda.is_initialized()


def _take(call: Call, part: dict[str, Any]) -> Count:
    print(part["said"], end="")
    if part["error"]:
        kind, message = part["error"]
        error = getattr(builtins, kind, None)
        if isinstance(error, type) and issubclass(error, Exception):
            raise error(message)
        raise RuntimeError(f"{kind}: {message}")
    for storage, changed in zip(child.storages((call.args, call.kwargs)), part["storages"], strict=True):
        if changed is not None:  # a large cache that was only read does not travel back
            storage.copy_(changed.untyped_storage())
    return part["count"]
