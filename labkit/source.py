"""A function's source as a module of its own, with everything that it refers to by global name.

Triton decides when `@triton.jit` decorates whether a kernel is interpreted or compiled, so a live kernel cannot be
taken over into the other world: its source can. Functions and classes of the function's own module or notebook are
carried as text, what other modules define is imported, and constants are written out.
"""

from __future__ import annotations

import ast
import builtins
import dataclasses
import enum
import inspect
import linecache
import math
import sys
import textwrap
import types
from typing import Any

import numpy as np
import torch
import triton.language as tl

from labkit import cells
from labkit.triton_internals import is_kernel, plain_function

FUTURE = "from __future__ import annotations"
STANDALONE = "<standalone>"  # the file name of what `run_standalone` runs


class NotStandalone(ValueError):
    """Something that a function refers to cannot be carried into another process."""


def standalone(function: Any) -> str:
    """The source of a module that defines `function` under its own name, and all that it needs.

    function: a `@triton.jit` kernel or a function, defined at the top level of a module or of notebook cells. Raises
    NotStandalone, with the name to look at, for closures, methods, and global values such as tensors.
    """
    plain = plain_function(function)
    if plain is None:
        kind = "a method" if inspect.ismethod(function) else f"a {type(function).__name__}"
        raise NotStandalone(f"{kind} has no source of its own: pass a function or a Triton kernel")
    carrier = _Carrier(plain.__globals__)
    carrier.define(function)
    return "\n".join([FUTURE, *sorted(carrier.imports), "", *carrier.definitions])


def run_standalone(source: str) -> dict[str, Any]:
    """Run such a source as a new module and give its names; linecache holds its text, where `@triton.jit` reads it."""
    module = types.ModuleType("standalone")
    sys.modules["standalone"] = module
    linecache.cache[STANDALONE] = (len(source), None, source.splitlines(keepends=True), STANDALONE)
    exec(compile(source, STANDALONE, "exec"), module.__dict__)
    return module.__dict__


class _Carrier:
    """Collects imports and definitions, dependencies first."""

    def __init__(self, namespace: dict[str, Any]):
        self.namespace = namespace
        self.imports: set[str] = set()
        self.definitions: list[str] = []
        self.done: set[str] = set()

    def define(self, value: Any) -> str:
        """Carry a function, kernel or class of this namespace, and all it refers to; gives its own name."""
        plain = value if isinstance(value, type) else plain_function(value)
        assert plain is not None
        name = plain.__name__
        if name in self.done:
            return name
        self.done.add(name)
        segment = _class_source(plain) if isinstance(plain, type) else _function_source(plain)
        _, used = cells.names(f"{FUTURE}\n{segment}")
        for other in sorted(used - {name}):
            if other in self.namespace:
                self.carry(other, self.namespace[other], name)
        self.definitions.append(segment)
        return name

    def carry(self, name: str, value: Any, user: str) -> None:
        """Make `name` mean `value` in the new module. `user` is the function that needs it, for the error."""
        if name in self.done:
            return
        if self._is_own(value):
            own = self.define(value)
            if own != name:
                self.done.add(name)
                self.definitions.append(f"{name} = {own}\n")
            return
        self.done.add(name)
        if isinstance(value, types.ModuleType):
            self.imports.add(f"import {value.__name__} as {name}")
        elif home := _home(value):
            self.imports.add(f"from {home[0]} import {home[1]} as {name}")
        else:
            self.definitions.append(f"{name} = {self._expression(value, name, user)}\n")

    def _is_own(self, value: Any) -> bool:
        if isinstance(value, type):
            return value.__module__ == self.namespace.get("__name__") and not _is_builtin(value)
        plain = plain_function(value)
        return plain is not None and plain.__globals__ is self.namespace

    def _expression(self, value: Any, name: str, user: str) -> str:
        """Source text whose value is `value`."""

        def inner(part: Any) -> str:
            return self._expression(part, name, user)

        plain_types = (bool, int, str, bytes, type(None), type(...))
        if type(value) in plain_types:
            return repr(value)
        if isinstance(value, float):
            return repr(value) if math.isfinite(value) else f"float('{value}')"
        if type(value) in (tuple, list, set, frozenset):
            return f"{type(value).__name__}([{', '.join(map(inner, value))}])"
        if type(value) is dict:
            return "{" + ", ".join(f"{inner(k)}: {inner(v)}" for k, v in value.items()) + "}"
        if isinstance(value, torch.dtype):
            self.imports.add("import torch")
            return str(value)
        if isinstance(value, torch.device):
            self.imports.add("import torch")
            return f"torch.device({str(value)!r})"
        if isinstance(value, tl.constexpr):
            self.imports.add("import triton.language")
            return f"triton.language.constexpr({inner(value.value)})"
        if type(value) is tl.dtype:
            self.imports.add("import triton.language")
            return f"triton.language.dtype({value.name!r})"
        if isinstance(value, np.generic):
            return inner(value.item())
        return self._instance(value, name, user, inner)

    def _instance(self, value: Any, name: str, user: str, inner: Any) -> str:
        cls = type(value)
        if isinstance(value, enum.Enum):
            self.carry(cls.__name__, cls, user)
            return f"{cls.__name__}.{value.name}"
        if dataclasses.is_dataclass(value):
            self.carry(cls.__name__, cls, user)
            fields = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
            return f"{cls.__name__}({', '.join(f'{k}={inner(v)}' for k, v in fields.items())})"
        raise NotStandalone(
            f"`{user}` uses the global `{name}` of type {cls.__name__}, which cannot be carried into another process: "
            "pass it as an argument"
        )


def _is_builtin(value: Any) -> bool:
    return getattr(builtins, value.__name__, None) is value


def _home(value: Any) -> tuple[str, str] | None:
    """(module, name) under which an importable module holds this very object, or None."""
    named = plain_function(value) if is_kernel(value) else value
    module, name = getattr(named, "__module__", None), getattr(named, "__name__", getattr(named, "_name", None))
    loaded = sys.modules.get(module or "")
    if loaded is None or module == "__main__" or getattr(loaded, "__spec__", None) is None or not isinstance(name, str):
        return None
    return (module, name) if getattr(loaded, name, None) is value else None  # type: ignore[return-value]


def _function_source(function: types.FunctionType) -> str:
    """The text of a top-level function, decorators included."""
    name, code = function.__qualname__, function.__code__
    if code.co_freevars:
        raise NotStandalone(
            f"`{name}` uses {', '.join(code.co_freevars)} of the function around it: pass it in instead"
        )
    if "<lambda>" in name or "<locals>" in name or "." in name:
        raise NotStandalone(f"`{name}` is not defined at the top level of a module or a cell")
    lines = linecache.getlines(code.co_filename, function.__globals__)
    for node in _nodes(lines, ast.FunctionDef):
        if node.name == function.__name__ and _first_line(node) == code.co_firstlineno:
            return _segment(lines, node)
    raise NotStandalone(
        f"the source of `{name}` is not to be found (file {code.co_filename!r}): define it in a plain cell"
    )


def _class_source(cls: type) -> str:
    """The text of a top-level class: from its module, or from the newest cell that defines one of this name."""
    if "." in cls.__qualname__:
        raise NotStandalone(f"class `{cls.__qualname__}` is not defined at the top level of a module or a cell")
    own = [plain_function(m) for m in vars(cls).values() if plain_function(m) is not None]
    files = [f.__code__.co_filename for f in own if f and f.__module__ == cls.__module__]
    module_file = getattr(sys.modules.get(cls.__module__), "__file__", None)
    cell_files = [name for name in reversed(linecache.cache) if name.startswith("<") or "ipykernel" in name]
    for file in [*files, *([module_file] if module_file else []), *cell_files]:
        lines = linecache.getlines(file)
        for node in reversed(_nodes(lines, ast.ClassDef)):
            if node.name == cls.__name__:
                return _segment(lines, node)
    raise NotStandalone(f"the source of class `{cls.__name__}` is not to be found: define it in a plain cell")


def _nodes(lines: list[str], kind: type) -> list[Any]:
    try:
        return [node for node in ast.walk(ast.parse("".join(lines))) if isinstance(node, kind)]
    except SyntaxError:
        return []


def _first_line(node: Any) -> int:
    return min([node.lineno, *(d.lineno for d in node.decorator_list)])


def _segment(lines: list[str], node: Any) -> str:
    return textwrap.dedent("".join(lines[_first_line(node) - 1 : node.end_lineno])).rstrip() + "\n"
