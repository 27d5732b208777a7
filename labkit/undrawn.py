"""Stand-ins for packages that only draw, where they are not installed: a notebook checked from its source needs none.

A lab's setup cell imports them in its first lines, and nothing that is graded lives in what they draw.
"""

from __future__ import annotations

import importlib.util
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from typing import Any

DRAWING = ("IPython", "ipywidgets", "matplotlib")


class Undrawn:
    """Whatever is asked of a package that is not there: each attribute and each call gives one more of these."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Undrawn:
        if name.startswith("__"):
            raise AttributeError(name)
        return Undrawn(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> Undrawn:
        return Undrawn(f"{self._name}()")

    def __repr__(self) -> str:
        return f"<{self._name}, which is not installed here>"


class _Finder(MetaPathFinder, Loader):
    def __init__(self, packages: set[str]) -> None:
        self._packages = packages

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname.split(".")[0] in self._packages else None

    def exec_module(self, module: types.ModuleType) -> None:
        stand_in = Undrawn(module.__name__)
        module.__getattr__ = lambda name: getattr(stand_in, name)  # type: ignore[method-assign]


def stand_in() -> set[str]:
    """From now on, importing a drawing package that is missing gives a stand-in. Gives the names of those."""
    missing = {name for name in DRAWING if name not in sys.modules and not _is_installed(name)}
    if missing:
        sys.meta_path.append(_Finder(missing))
    return missing


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ImportError:
        return False
