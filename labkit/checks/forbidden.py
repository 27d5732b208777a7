"""What an answer may not use, found in its source. The grader's own process runs this on the submitted cells.

It is one of three fences: the sandbox masks the shipped modules, so that a name assembled at run time finds nothing,
and the hidden checks compare values outside the student's process.
"""

from __future__ import annotations

import ast
import inspect
import linecache
import os
import textwrap
from typing import Any

# Ways to reach a module or a frame without naming it. None is needed to answer any question of the camp.
DYNAMIC = (
    "__import__", "builtins", "ctypes", "eval", "exec", "gc", "get_ipython", "globals", "importlib", "inspect",
    "pickle", "runpy", "subprocess", "sys.modules", "sys._getframe", "vars",
)  # fmt: skip
DYNAMIC_ATTRIBUTES = {"__subclasses__", "__globals__", "__builtins__", "__loader__", "f_back", "f_globals"}
OURS = ("labkit", "kernels")


def violations(source: str, names: tuple[str, ...], allowed: tuple[str, ...] = ()) -> list[str]:
    """Sentences that name each forbidden use in `source`; a cell that does not parse has none (it cannot run).

    names: dotted names of modules or functions. allowed: names of ours that are fine; every other is refused.
    """
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return []
    found: list[str] = []
    for used in sorted(_dotted_names(tree)):
        if any(_covers(bad, used) for bad in names + DYNAMIC) or (
            used.split(".")[0] in OURS and not any(_covers(good, used) for good in allowed)
        ):
            found.append(f"`{used}` may not be used in this answer")
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in DYNAMIC_ATTRIBUTES:
            found.append(f"`.{node.attr}` may not be used in this answer")
    return found


def _covers(name: str, used: str) -> bool:
    return used == name or used.startswith(name + ".")


def _dotted_names(tree: ast.AST) -> set[str]:
    """Every imported module or name, and every dotted use with its import alias resolved."""
    aliases: dict[str, str] = {}
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                aliases[a.asname or a.name.split(".")[0]] = a.name if a.asname else a.name.split(".")[0]
                names.add(a.name)
        elif isinstance(node, ast.ImportFrom) and node.module:
            for a in node.names:
                aliases[a.asname or a.name] = f"{node.module}.{a.name}"
                names.add(f"{node.module}.{a.name}")
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if dotted:
            head, _, rest = dotted.partition(".")
            names.add(".".join(filter(None, (aliases.get(head, COMMON_ALIASES.get(head, head)), rest))))
    return names


# The setup cell of every lab imports these, so an answer uses them without an import of its own.
COMMON_ALIASES = {"F": "torch.nn.functional", "tl": "triton.language", "np": "numpy"}


def _dotted(node: ast.AST) -> str:
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        left = _dotted(node.value)
        return f"{left}.{node.attr}" if left else ""
    return ""


def shipped_object(answer: Any) -> str:
    """A sentence if `answer` itself, or a base class of it, comes from labkit or kernels; else an empty string."""
    owners = answer.__mro__ if isinstance(answer, type) else (answer,)
    for owner in owners:
        module = getattr(owner, "__module__", "") or ""
        if module.split(".")[0] in OURS:
            return f"`{module}.{getattr(owner, '__qualname__', owner)}` is the camp's own code, not an answer"
    return ""


def source_of(answer: Any) -> str:
    """The source of the whole cell that defined the answer, or "" where there is none to read (a built-in, say).

    `inspect.getsource` cannot find a class of a notebook, so the cell is looked up by the file name of its code.
    """
    functions = [answer] if not isinstance(answer, type) else list(vars(answer).values())
    codes = [f.__code__ for f in (getattr(f, "fn", f) for f in functions) if hasattr(f, "__code__")]
    if not codes:
        return ""
    if os.path.exists(codes[0].co_filename):  # a module, of which only the answer itself is looked at
        return textwrap.dedent(inspect.getsource(answer))
    return "".join(linecache.getlines(codes[0].co_filename))
