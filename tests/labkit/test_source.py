"""A function's source as a module of its own, from modules and from notebook cells."""

from __future__ import annotations

import dataclasses
import enum
import functools
import linecache
import math
import math as mathematics
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from labkit import device
from labkit.cells import run_cell
from labkit.models import ModelShape
from labkit.source import NotStandalone, standalone


def load(source: str) -> dict:
    """Run a standalone source where nothing else is defined."""
    linecache.cache["<loaded>"] = (len(source), None, source.splitlines(keepends=True), "<loaded>")
    namespace: dict = {"__name__": "loaded"}
    sys.modules["loaded"] = type(sys)("loaded")
    exec(compile(source, "<loaded>", "exec"), namespace)
    return namespace


def notebook(*cells: str) -> dict:
    """A namespace like a notebook's, after running some cells."""
    namespace: dict = {"__name__": "__main__"}
    for number, cell in enumerate(cells):
        run_cell(cell, namespace, f"source test {number}")
    return namespace


class Kind(enum.Enum):
    FULL = "full"


@dataclasses.dataclass(frozen=True)
class Tile:
    """A class of this module, with a method."""

    rows: int
    columns: int = 4

    def area(self) -> int:
        return self.rows * self.columns


SCALE, INFINITY, NAMES = 0.5, math.inf, {"a": (1, [2.0, None]), "b": {"c"}}
DTYPE, TL_DTYPE, WIDTH = torch.float16, tl.float32, tl.constexpr(16)
TILE, KIND, COUNT = Tile(3), Kind.FULL, np.int64(7)
SHAPE = ModelShape("m", 1, 2, 1, 64, 1)
TABLE = torch.zeros(3)


def helper(x: Callable, tile: Tile = TILE) -> float:
    return helper_of_helper(x) * SCALE + tile.area()


def helper_of_helper(x):
    return x + mathematics.sqrt(16)


alias = helper


def uses_helpers(x):
    return alias(x)


def uses_values():
    return SCALE, INFINITY, NAMES, DTYPE, TL_DTYPE, WIDTH, TILE, KIND.value, COUNT, SHAPE


def uses_a_tensor():
    return TABLE.sum()


@functools.cache
def even(n):
    return n == 0 or odd(n - 1)


def odd(n):
    return n != 0 and even(n - 1)


@triton.jit
def _twice(x):
    return x * 2


@triton.heuristics({"BLOCK": lambda arguments: 16})
@triton.jit
def kernel(x_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    tl.store(x_ptr + offsets, _twice(tl.load(x_ptr + offsets, mask=offsets < n)), mask=offsets < n)


def test_helpers_are_carried_over_recursively_under_the_names_they_are_used_by():
    assert load(standalone(uses_helpers))["uses_helpers"](1.0) == 5.0 * 0.5 + 12


def test_constants_types_and_instances_keep_their_values():
    got = load(standalone(uses_values))["uses_values"]()
    assert got[:5] == (SCALE, INFINITY, NAMES, DTYPE, TL_DTYPE)
    assert got[5].value == 16
    assert (got[6].area(), got[7], got[8]) == (12, "full", 7)
    assert got[9] == SHAPE


def test_functions_that_call_each_other_and_decorators_are_carried_once():
    source = standalone(odd)
    assert source.count("def even") == source.count("def odd") == 1
    assert load(source)["odd"](7) is True


def test_a_kernel_brings_its_device_functions_and_its_decorators():
    source = standalone(kernel)
    assert "@triton.heuristics" in source and "def _twice" in source
    x = torch.ones(5, device=device.name())
    load(source)["kernel"][(1,)](x, 5)
    assert x.eq(2).all()


def test_what_is_not_used_is_not_carried():
    source = standalone(uses_helpers)
    assert "TABLE" not in source and "kernel" not in source


def test_other_modules_are_imported_and_not_copied():
    source = standalone(uses_values)
    assert "from labkit.models.shapes import ModelShape as ModelShape" in source
    assert "import math as mathematics" in standalone(uses_helpers)


CELLS = (
    "import torch, triton\nimport triton.language as tl\nfrom dataclasses import dataclass\nBLOCK = 16",
    "def offsets_of(n):\n    return n + 1",
    "def offsets_of(n):\n    return n + BLOCK  # the newer definition\n\n@dataclass\nclass Plan:\n    size: int",
    "@triton.jit\ndef _k(x_ptr, B: tl.constexpr):\n    o = tl.arange(0, B)\n    tl.store(x_ptr + o, o * 1.0)",
    "def run(x):\n    plan = Plan(offsets_of(0))\n    _k[(1,)](x, B=plan.size)\n    return x",
)


def test_a_notebooks_function_is_gathered_from_its_cells_the_newest_definition_counting():
    source = standalone(notebook(*CELLS)["run"])
    assert "the newer definition" in source and "return n + 1" not in source
    assert torch.equal(load(source)["run"](torch.zeros(16, device=device.name())).cpu(), torch.arange(16.0))


def test_a_standalone_module_needs_nothing_of_the_process_that_made_it(tmp_path):
    path = tmp_path / "alone.py"
    path.write_text(standalone(notebook(*CELLS)["run"]) + "\nimport torch\nprint(run(torch.zeros(16)).sum().item())\n")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run([sys.executable, path], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "120.0\n", done.stderr


def test_a_cell_that_ipython_ran_is_found_too():
    shell = pytest.importorskip("IPython.core.interactiveshell").InteractiveShell.instance()
    for cell in CELLS:
        assert shell.run_cell(cell, store_history=True).success
    source = standalone(shell.user_ns["run"])
    assert "class Plan" in source and "the newer definition" in source


def closure():
    size = 3

    def inner(x):
        return x + size

    return inner


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (uses_a_tensor, "`uses_a_tensor` uses the global `TABLE` of type Tensor"),
        (closure(), "uses size of the function around it"),
        (lambda x: x, "not defined at the top level"),
        (TILE.area, "a method has no source of its own"),
        (len, "a builtin_function_or_method has no source"),
        (functools.partial(helper, 1), "a partial has no source"),
    ],
)
def test_what_cannot_be_carried_is_refused_by_name(function, message):
    with pytest.raises(NotStandalone, match=message):
        standalone(function)


def test_source_that_is_not_to_be_found_is_said():
    namespace: dict = {"__name__": "__main__"}
    exec("def typed_in():\n    return 1", namespace)
    with pytest.raises(NotStandalone, match="source of `typed_in` is not to be found"):
        standalone(namespace["typed_in"])


def test_the_module_under_test_is_not_imported_by_the_standalone_source():
    assert Path(__file__).stem not in standalone(uses_values)
