"""docs/debugging.md is true: its examples are run, and say what it says. And the tools of labkit.debugging."""

from __future__ import annotations

import contextlib
import io
import pdb
import re
import sys
from pathlib import Path

import pytest
import torch
import triton
import triton.language as tl

from labkit import cells
from labkit.debugging import find_order_dependence, find_races
from labkit.meter import Call

PAGE = Path(__file__).resolve().parents[2] / "docs/debugging.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks():
    """(kind, text) of each fenced block of the page."""
    return BLOCK.findall(PAGE.read_text(encoding="utf-8"))


def run_page(monkeypatch):
    """Run the page's Python one block after another; gives (expected, said) for each block that shows an output."""
    # pytest has put a debugger of its own in the place of pdb's. nosigint: pdb's handler of Ctrl-C would stay.
    monkeypatch.setattr("sys.breakpointhook", lambda: pdb.Pdb(nosigint=True).set_trace(sys._getframe(1)))
    namespace, found, parts = {"__name__": "__main__"}, [], blocks()
    for number, (kind, text) in enumerate(parts):
        if kind != "python":
            continue
        shown_as, shown = parts[number + 1] if number + 1 < len(parts) else ("", "")
        if shown_as == "console":
            commands = [line.removeprefix("(Pdb) ") for line in shown.splitlines() if line.startswith("(Pdb) ")]
            monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(commands) + "\n"))
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            cells.run_cell(text, namespace, f"page{number}")
        if shown_as in ("console", "text"):
            found.append((shown_as, shown, said.getvalue()))
        else:
            assert said.getvalue() == "", f"the page does not show what this prints:\n{text}"
    return found


def test_every_example_of_the_page_says_what_the_page_says(monkeypatch):
    examples = run_page(monkeypatch)
    assert len(examples) >= 10
    for kind, shown, said in examples:
        if kind == "console":  # pdb also says where it stopped, in lines that begin with > and ->
            shown = "".join(line for line in shown.splitlines(True) if not line.startswith("(Pdb) "))
            lines = said.replace("(Pdb) ", "").splitlines(True)
            said = "".join(line for line in lines if not line.startswith((">", "->")))
        assert said == shown


def test_the_page_names_no_tool_that_does_not_exist():
    import labkit

    table = PAGE.read_text(encoding="utf-8").partition("What does not exist")[0]
    named = set(re.findall(r"`(?:labkit\.)?(meter|access_map|debugging|bank_conflicts|compiled)\.(\w+)`", table))
    assert len(named) >= 4
    for module, name in named:
        assert hasattr(getattr(labkit, module), name), f"{module}.{name}"
    assert not hasattr(tl, "warp_sync") and not hasattr(triton.tools, "debugger")


@triton.jit
def sum_kernel(x_ptr, out_ptr):
    tl.atomic_add(out_ptr, tl.load(x_ptr + tl.program_id(0)))


def atomic_sum(x, *, out):
    sum_kernel[(x.numel(),)](x, out)


@triton.jit
def last_kernel(out_ptr):
    tl.store(out_ptr, tl.program_id(0).to(tl.float32))


def last_wins(out):
    last_kernel[(4,)](out)
    return out + 0, "not a tensor"


def test_rounding_of_an_atomic_sum_is_no_dependence_on_order_and_no_race():
    torch.manual_seed(0)
    call = Call(atomic_sum, (torch.randn(100),), {"out": torch.zeros(1)})
    assert find_order_dependence(call) is None
    assert find_races(call) == ()
    assert call.kwargs["out"].item() == 0, "the call's own tensors must be left alone"


def test_the_last_of_several_stores_depends_on_the_order_and_is_a_race():
    out = torch.zeros(1)
    found = find_order_dependence(Call(last_wins, (out,)), seeds=(5,))
    assert found and (found.where, found.index, found.in_order, found.seed) == ("argument 0", (0,), 3.0, 5)
    assert {(race.first, race.second) for race in find_races(Call(last_wins, (out,)))} == {("store", "store")}
    assert out.item() == 0


def test_an_error_of_the_call_comes_through():
    with pytest.raises(ZeroDivisionError):
        find_races(Call(divides, (0,)))


def divides(n):
    return 1 / n
