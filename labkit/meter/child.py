"""The child's side: runs each call from its source, under a counter of its own."""

from __future__ import annotations

import contextlib
import io
import traceback
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from labkit import cells, triton_internals
from labkit.meter.count import Counter, Follow
from labkit.servers import pack
from labkit.source import STANDALONE, run_standalone


def answer(
    sources: list[tuple[str, str]], arguments: list[tuple[tuple, dict]], shuffle: int | None, follow: Follow | None,
    conflicts: bool, timeout: float,
) -> bytes:  # fmt: skip
    """In the server: `run_calls` in a fork of its own."""
    return cells.forked(lambda: run_calls(sources, arguments, shuffle, follow, conflicts), timeout)


def run_calls(
    sources: list[tuple[str, str]], arguments: list[tuple[tuple, dict]], shuffle: int | None, follow: Follow | None,
    conflicts: bool,
) -> bytes:  # fmt: skip
    """In the child: run each call under a counter of its own and pack what became of it."""
    torch.set_num_threads(1)  # OpenMP's pool does not survive a fork
    counter = _Relay()
    random = np.random.default_rng(shuffle)
    order = random.permutation if shuffle is not None else None
    triton_internals.observe(counter, order, touches=conflicts or follow is not None)
    parts = []
    for (source, name), (args, kwargs) in zip(sources, arguments, strict=True):
        counter.current = Counter(follow, conflicts)
        parts.append(_run(source, name, args, kwargs, counter.current))
    return pack(parts)


class _Relay:
    """The recorder that Triton's interpreter is given once; the counter behind it changes with each call."""

    current: Counter

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


def _run(source: str, name: str, args: tuple, kwargs: dict, counter: Counter) -> dict[str, Any]:
    said = io.StringIO()
    part: dict[str, Any] = {"error": None, "count": None, "storages": []}
    try:
        before = [_bytes(s).clone() for s in storages((args, kwargs))]
        with contextlib.redirect_stdout(said):
            result = run_standalone(source)[name](*args, **kwargs)
        part["count"] = counter.count(_on_cpu(result))
        after = [_bytes(s) for s in storages((args, kwargs))]
        part["storages"] = [None if torch.equal(*pair) else pair[1] for pair in zip(before, after, strict=True)]
    except BaseException as error:
        part["error"] = _describe(error)
    return part | {"said": said.getvalue()}


def _describe(error: BaseException) -> tuple[str, str]:
    """(type, message with the innermost line of the measured source). Triton wraps an error once a call level."""
    while type(error).__name__ == "InterpreterError" and error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == STANDALONE and f.line]
    where = f" (at `{frames[-1].line.strip()}`)" if frames and frames[-1].line else ""
    return type(error).__name__, f"{error}{where}"


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]


def storages(value: Any) -> list[torch.UntypedStorage]:
    """Each storage behind the tensors in nested tuples, lists and dicts once, in a fixed order."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in _tensors(value):
        storage = tensor.untyped_storage()
        found.setdefault(storage.data_ptr() if storage.nbytes() else -len(found) - 1, storage)
    return list(found.values())


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for element in value:
            yield from _tensors(element)
    elif isinstance(value, dict):
        yield from _tensors(tuple(value.values()))


def _on_cpu(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().cpu().clone()  # a later call may write to its storage
    if type(value) in (tuple, list):
        return type(value)(_on_cpu(element) for element in value)
    return value
