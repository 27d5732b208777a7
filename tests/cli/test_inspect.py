"""`labkit inspect`: every kernel of kernels/ has an example that compiles, and what it prints is what was compiled."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from labkit import cli
from labkit.compiled import calls, compile_call, examples
from tests.cli.toy import one_line

KERNELS = Path(__file__).resolve().parents[2] / "kernels"


def run(*words):
    return CliRunner().invoke(cli.app, list(words))


def launched_kernels(path: Path) -> set[str]:
    """The kernels that a module decorates and launches itself."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    jitted = {
        n.name
        for n in ast.walk(tree)
        if isinstance(n, ast.FunctionDef) and any("jit" in ast.unparse(decorator) for decorator in n.decorator_list)
    }
    calls_of_items = [n.func for n in ast.walk(tree) if isinstance(n, ast.Call) and isinstance(n.func, ast.Subscript)]
    return {f.value.id for f in calls_of_items if isinstance(f.value, ast.Name)} & jitted


@pytest.mark.parametrize("path", sorted(KERNELS.glob("*.py")), ids=lambda path: path.stem)
def test_every_kernel_that_is_launched_has_an_example_that_compiles(path):
    launched = launched_kernels(path)
    if not launched and path.stem not in {e.module for e in examples.EXAMPLES}:
        return
    compiled = {made.kernel for e in examples.examples_of(path.stem) for made in compile_call(e.call(), arch="sm_90")}
    assert compiled, "an example of a module that launches nothing, not even another module's kernel"
    assert launched <= compiled, f"add an example to labkit/compiled/examples.py that launches {launched - compiled}"


def test_inspect_prints_resources_occupancy_instructions_and_layouts():
    result = run("inspect", "kv_cache", "--arch", "sm_80")
    assert result.exit_code == 0, result.output
    for words in ("_write_kv_kernel on sm_80", "called as      kv_cache.write_kv", "occupancy      64 of 64 warps",
                  "global_load", "#ttg.blocked", "HEAD_DIM=128"):  # fmt: skip
        assert words in result.stdout


def test_inspect_as_json_is_the_same_for_a_module_and_its_function():
    by_module, by_function = (run("inspect", name, "--json") for name in ("kv_cache", "kv_cache.write_kv"))
    assert by_module.stdout == by_function.stdout
    (made,) = json.loads(by_module.stdout)
    (direct,) = compile_call(examples.examples_of("kv_cache")[0].call())
    assert (made["registers"], made["instructions"]) == (direct.registers, direct.instructions)
    assert made["occupancy"]["limited_by"] == list(direct.occupancy.limited_by)
    assert made["grid"] == [16] and made["arch"] == "sm_90"


def test_inspect_shows_a_stage_with_source_lines():
    result = run("inspect", "kv_cache", "--show", "sass")
    assert result.exit_code == 0 and "k = tl.load(k_ptr + token" in result.stdout


@pytest.mark.parametrize(
    "words, said",
    [
        (["softmax"], "no kernel 'softmax'; there are: paged_attention, kv_cache"),
        (["kv_cache", "--arch", "sm_70"], "arch: 'sm_70' is not one of sm_80"),
        (["kv_cache", "--show", "elf"], "no stage 'elf'; there are: ttir, ttgir, llir, ptx, sass"),
    ],
)
def test_what_inspect_cannot_do_is_one_line(words, said):
    one_line(run("inspect", *words), said)


def test_a_function_with_two_examples_is_named_once():
    assert run("inspect", "softmax").output.count("skinny_matmul.skinny_matmul") == 1


def test_a_kernel_that_does_not_compile_is_one_line(monkeypatch):
    def fail(kind, *arguments, timeout):
        raise RuntimeError("nothing fits (at `tl.dot(q, k)`)")

    monkeypatch.setattr(calls, "ask_compiler", fail)
    one_line(run("inspect", "kv_cache"), "nothing fits (at `tl.dot(q, k)`)")
