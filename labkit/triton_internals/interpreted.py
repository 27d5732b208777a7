"""Which tier a process has, what a kernel is, and which kernels are launched."""

from __future__ import annotations

import contextlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import triton
import triton.language as tl
from triton.runtime import interpreter, jit


def interpreting() -> bool:
    """True where Triton's own library was decorated for the interpreter, so that kernels of this process can run."""
    return bool(triton.knobs.runtime.interpret) and isinstance(tl.sum, interpreter.InterpretedFunction)


def interpret_library() -> None:
    """Interpret Triton's own functions (tl.sum, tl.max, ...) where Triton was imported before the tier was picked.

    They are decorated when Triton is imported, and an interpreted kernel cannot call a compiled one. Does nothing where
    they are interpreted already.
    """
    remade: dict[int, Any] = {}
    modules = [m for name, m in sys.modules.items() if m and name.split(".")[:2] == ["triton", "language"]]
    for owner in [*modules, tl.tensor]:
        for name, value in list(vars(owner).items()):
            if isinstance(value, jit.JITFunction):
                function = remade.setdefault(id(value), interpreter.InterpretedFunction(value.fn))
                setattr(owner, name, _method(function) if owner is tl.tensor else function)


def _method(function: Any) -> Callable:
    """x.sum() needs something that binds x, which an InterpretedFunction does not."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def is_kernel(value: Any) -> bool:
    """True for what `@triton.jit`, `@triton.autotune` and `@triton.heuristics` make."""
    return isinstance(value, jit.KernelInterface)


def plain_function(value: Any) -> types.FunctionType | None:
    """The Python function under any layers of Triton or functools decorators, or None if there is none."""
    while value is not None and not isinstance(value, types.FunctionType):
        value = getattr(value, "fn", None) if is_kernel(value) else getattr(value, "__wrapped__", None)
    return inspect.unwrap(value) if value is not None else None


@contextlib.contextmanager
def launched() -> Iterator[list[str]]:
    """The names of the kernels that are launched inside, be they interpreted or run on a GPU; one for each launch."""
    names: list[str] = []
    interpreted, compiled = interpreter.GridExecutor.__call__, jit.JITFunction.run

    def call(executor: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(executor.fn.__name__)
        return interpreted(executor, *args, **kwargs)

    def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.fn.__name__)
        return compiled(kernel, *args, **kwargs)

    interpreter.GridExecutor.__call__, jit.JITFunction.run = call, run
    try:
        yield names
    finally:
        interpreter.GridExecutor.__call__, jit.JITFunction.run = interpreted, compiled
