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
from collections.abc import Iterator
from typing import Any

OURS = ("labkit", "kernels")

# Ways to reach a module or a frame without naming it. None is needed to answer any question of the camp.
DYNAMIC_BUILTINS = {
    "__builtins__", "__import__", "__loader__", "__spec__", "breakpoint", "compile", "eval", "exec", "get_ipython",
    "globals", "locals", "vars",
}  # fmt: skip
DYNAMIC_MODULES = (
    "IPython.core", "IPython.get_ipython", "builtins", "code", "codeop", "ctypes", "doctest", "gc", "importlib",
    "inspect", "linecache", "marshal", "multiprocessing", "numpy.testing.measure", "numpy.testing.rundocs",
    "numpy.testing.runstring", "operator.attrgetter", "operator.methodcaller", "os", "pdb", "pickle", "pkgutil",
    "pydoc", "runpy", "string.Formatter", "subprocess", "sympy", "sys.modules", "sys._getframe", "timeit.Timer",
    "timeit.repeat", "timeit.timeit", "torch.hub", "torch.load", "torch.package", "torch.utils",
    "traceback.StackSummary", "traceback.TracebackException", "traceback.walk_stack", "typing.get_type_hints", "vllm",
)  # fmt: skip
# Modules that other modules import, so that `module.os` leads to them too.
WITHIN = {"builtins", "ctypes", "gc", "importlib", "inspect", "os", "pickle", "subprocess", "sys", *OURS}
DYNAMIC_ATTRIBUTES = {
    "_getframe", "ag_frame", "cr_frame", "f_back", "f_builtins", "f_code", "f_globals", "f_locals", "gi_frame",
    "tb_frame", "tb_next",
}  # fmt: skip
# Of the names with two underscores on either side, which lead anywhere, those that an answer has a use for.
PLAIN_DUNDERS = {
    "__call__", "__class__", "__contains__", "__doc__", "__enter__", "__eq__", "__exit__", "__getitem__", "__hash__",
    "__init__", "__iter__", "__len__", "__lt__", "__name__", "__new__", "__next__", "__post_init__", "__qualname__",
    "__repr__", "__setitem__", "__str__",
}  # fmt: skip

# The setup cell of every lab imports these, so an answer uses them without an import of its own.
COMMON_ALIASES = {"F": "torch.nn.functional", "tl": "triton.language", "np": "numpy"}


def violations(source: str, names: tuple[str, ...], allowed: tuple[str, ...] = (), context: str = "") -> list[str]:
    """Sentences that name each forbidden use in `source`; empty if there is none.

    names: dotted names of modules or functions. A function's last name is refused as an attribute of any variable too,
    since `f = torch.nn.functional` and `x.cumsum()` reach it as well.
    allowed: dotted names that are fine in spite of the camp's general rules: modules of ours, `subprocess`.
    context: cells that are not the student's; only their imports are looked at. What they import by name from a module
    of ours (`from labkit.models import ModelShape`) is offered, and fine unless `names` has it.
    A source that is not plain Python is refused, since IPython runs `%run`, `!python` and `%%magic` cells.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError) as error:
        return [f"the cell cannot be read as plain Python, without magics such as %time ({error})"]
    imported, aliases = _imports(tree)
    given = _imports(_parsed(context))[1]
    allowed += tuple(target for target in given.values() if "." in target)
    aliases = COMMON_ALIASES | given | aliases
    bound = _bound(tree) - set(aliases)
    attributes = {name.rpartition(".")[2] for name in names if name.split(".")[0] not in OURS and "." in name}
    found = {name for name in imported if _refused(name, names, allowed)}
    for chain in _chains(tree):
        head, *rest = chain.split(".")
        used = ".".join([aliases.get(head, head), *rest])
        is_module = head not in bound
        reaches = bool(WITHIN & set(rest)) or _refused(used, names, allowed)
        hands_on = used in ("sys", "getattr")  # as a value: `reduce(getattr, names, x)` goes anywhere
        if head in DYNAMIC_BUILTINS or hands_on or (is_module and reaches):
            found.add(used)
        found |= {f".{a}" for a in rest if _leads_out(a) or (a in attributes and not head)}
        found |= {f"{head}.{a}" for a in rest if a in attributes and (head in bound or used.startswith("torch."))}
        if used.startswith("torch.") and any(part.startswith("_") for part in used.split(".")):
            found.add(used)
    found |= {
        f".{name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.MatchClass)
        for name in node.kwd_attrs
        if _leads_out(name)
    }
    if "operator.matmul" in names and any(isinstance(node, ast.MatMult) for node in ast.walk(tree)):
        found.add("@")
    return [f"`{name}` may not be used in this answer" for name in sorted(found)]


def _leads_out(attribute: str) -> bool:
    """Whether an attribute of any object may lead to a frame, a module or the built-ins."""
    dunder = attribute.startswith("__") and attribute.endswith("__")
    return attribute in DYNAMIC_ATTRIBUTES or (dunder and attribute not in PLAIN_DUNDERS)


def _refused(used: str, names: tuple[str, ...], allowed: tuple[str, ...]) -> bool:
    if any(_covers(bad, used) for bad in names):
        return True
    general = used.split(".")[0] in OURS or any(_covers(bad, used) for bad in DYNAMIC_MODULES)
    return general and not any(_covers(good, used) for good in allowed)


def _covers(name: str, used: str) -> bool:
    return used == name or used.startswith(name + ".")


def _parsed(source: str) -> ast.AST:
    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return ast.Module([], [])


def _imports(tree: ast.AST) -> tuple[set[str], dict[str, str]]:
    """Every imported module or name in full, and what each local name of an import stands for."""
    names: set[str] = set()
    aliases: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for a in node.names:
                names.add(a.name)
                top = a.name.split(".")[0]
                aliases[a.asname or top] = a.name if a.asname else top
        elif isinstance(node, ast.ImportFrom) and node.module:
            for a in node.names:
                names.add(f"{node.module}.{a.name}")
                aliases[a.asname or a.name] = f"{node.module}.{a.name}"
    return names, aliases


def _bound(tree: ast.AST) -> set[str]:
    """Names that hold a value of the cell's own: assigned to, or a parameter."""
    stored = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and not isinstance(n.ctx, ast.Load)}
    return stored | {n.arg for n in ast.walk(tree) if isinstance(n, ast.arg)}


def _chains(node: ast.AST) -> Iterator[str]:
    """Every dotted use, as long as it goes: "torch.nn.functional.relu"; ".attr" where it starts at no name.

    `getattr(x, "name")` is `x.name`; with a computed name it is given as the attribute `__getattribute__`.
    """
    parts: list[str] = []
    while step := _attribute(node):
        if isinstance(node, ast.Call):
            for argument in (*node.args[1:], *node.keywords):
                yield from _chains(argument)
        node, name = step
        parts.insert(0, name)
    if isinstance(node, ast.Name):
        yield ".".join([node.id, *parts])
        return
    if parts:
        yield ".".join(["", *parts])
    for child in ast.iter_child_nodes(node):
        yield from _chains(child)


def _attribute(node: ast.AST) -> tuple[ast.AST, str] | None:
    """(object, attribute name) if the node is an attribute, else None."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr" and node.args:
        name = node.args[1] if len(node.args) > 1 else None
        fixed = isinstance(name, ast.Constant) and isinstance(name.value, str)
        return node.args[0], name.value if fixed else "__getattribute__"  # type: ignore[union-attr]
    return None


def shipped_object(answer: Any) -> str:
    """A sentence if `answer` itself, or a base class of it, comes from labkit or kernels; else an empty string."""
    owners = answer.__mro__ if isinstance(answer, type) else _unwrapped(answer)
    for owner in owners:
        module = getattr(owner, "__module__", "") or ""
        if module.split(".")[0] in OURS:
            return f"`{module}.{getattr(owner, '__qualname__', owner)}` is the camp's own code, not an answer"
    return ""


def _unwrapped(answer: Any) -> list[Any]:
    """The answer and what it wraps: a Triton kernel's function, a partial's, a method's, a decorated one."""
    layers = [answer]
    while len(layers) < 20:
        inner = next(
            (vars(layers[-1])[n] for n in ("fn", "__wrapped__") if n in getattr(layers[-1], "__dict__", {})), None
        )
        inner = inner or next(
            (getattr(layers[-1], n) for n in ("func", "__func__", "fget") if hasattr(layers[-1], n)), None
        )
        if inner is None:
            break
        layers.append(inner)
    return layers


def source_of(answer: Any) -> str:
    """The source of the whole cell that defined the answer, or "" where there is none to read (a built-in, say).

    `inspect.getsource` cannot find a class of a notebook, so the cell is looked up by the file name of its code.
    """
    functions = list(vars(answer).values()) if isinstance(answer, type) else [answer]
    innermost = [_unwrapped(f)[-1] for f in functions]
    files = dict.fromkeys(f.__code__.co_filename for f in innermost if hasattr(f, "__code__"))
    for file in files:
        if os.path.exists(file):  # a module, of which only the answer itself is looked at
            return textwrap.dedent(inspect.getsource(answer if isinstance(answer, type) else innermost[0]))
        if lines := linecache.getlines(file):  # a generated method, such as a dataclass's __init__, has none
            return "".join(lines)
    return ""
