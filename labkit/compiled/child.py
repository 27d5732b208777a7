"""The compiling process's side: runs where TRITON_INTERPRET is not set."""

from __future__ import annotations

import contextlib
import io
import os
import tempfile
from collections.abc import Callable
from typing import Any

from labkit import cells
from labkit.source import run_standalone
from labkit.triton_internals import compiling


def kernel(
    source: str, name: str, types: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any],
    timeout: float,
) -> tuple[list[compiling.Build], str]:  # fmt: skip
    """Compile kernel `name` of a standalone source by its signature; gives what was built, and what was printed."""

    def work() -> list[compiling.Build]:
        return [compiling.build(run_standalone(source)[name], types, constants, capability, options)]

    return _compiled(work, timeout)


def call(
    source: str,
    name: str,
    args: tuple,
    kwargs: dict[str, Any],
    capability: int,
    num_sms: int,
    timeout: float,
) -> tuple[list[compiling.Build], str]:
    """Compile each kernel that calling function `name` of a standalone source would launch."""

    def work() -> list[compiling.Build]:
        function = run_standalone(source)[name]
        with compiling.recorded_launches(capability, num_sms) as builds:
            function(*args, **kwargs)
        return builds

    return _compiled(work, timeout)


def conflicts(registers: Any, shared: Any, shape: list[int], bits: int, timeout: float) -> int:
    """Bank conflicts between two Gluon layouts."""
    return _compiled(lambda: compiling.bank_conflicts(registers, shared, shape, bits), timeout)[0]


def linear(registers: Any, shape: list[int], timeout: float) -> Any:
    """A Gluon layout of registers as a linear layout."""
    return _compiled(lambda: compiling.linear_layout(registers, shape), timeout)[0]


def answer(kind: str, *arguments: Any) -> Any:
    """In the server: one of the four above."""
    work: dict[str, Callable[..., Any]] = {"kernel": kernel, "call": call, "conflicts": conflicts, "linear": linear}
    return work[kind](*arguments)


def _compiled(work: Callable[[], Any], timeout: float) -> tuple[Any, str]:
    """Run `work` in a fork of its own, whose crash, such as a compiler's failed assertion, is an error here."""
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile() as errors:
        try:
            made, printed, failed = cells.forked(lambda: _in_fork(work, cache, errors.fileno()), timeout)
        except RuntimeError as error:
            errors.seek(0)
            raise RuntimeError(f"{error}{_last_words(errors.read())}") from None
        errors.seek(0)
        if failed is not None:
            raise RuntimeError(failed if failed.strip() else f"{failed}{_last_words(errors.read())}")
    return made, printed


def _in_fork(work: Callable[[], Any], cache: str, errors: int) -> tuple[Any, str, str | None]:
    os.dup2(errors, 2)
    os.environ["TRITON_CACHE_DIR"] = cache  # nothing is taken from Triton's cache: the assembler must report
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            return work(), printed.getvalue(), None
    except Exception as error:
        return None, printed.getvalue(), compiling.what_failed(error)


def _last_words(errors: bytes) -> str:
    lines = [line for line in errors.decode(errors="replace").splitlines() if line.strip()]
    reasons = [line for line in lines if "error:" in line or "Assertion" in line or "LLVM ERROR" in line]
    return f": {(reasons or lines)[-1].strip()}" if lines else ""
