"""What the plugins use of vLLM's inside is still there, in the newest version that is supported and in the oldest."""

from __future__ import annotations

import importlib
import inspect
import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from labkit.serve.plugins import contract
from labkit.serve.plugins.contract import Need

RECORDED = Path(__file__).parent / "data/vllm_0_26_surface.json"
"""`contract.read_surface` of the unpacked wheel of vLLM 0.26.0, which needs a GPU to be installed."""

needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its names cannot be looked up")


@needs_vllm
def test_the_installed_vllm_has_all_that_the_plugins_use():
    assert contract.broken() == []


def test_vllm_0_26_has_all_that_the_plugins_use():
    recorded = json.loads(RECORDED.read_text(encoding="utf-8"))
    assert set(recorded) == {need.name for need in contract.NEEDS}, "record it again: a need was added or removed"
    assert [fault for need in contract.NEEDS for fault in contract.faults(need, recorded)] == []


@needs_vllm
@pytest.mark.parametrize("need", [n for n in contract.NEEDS if n.parameters and ".worker." not in n.name], ids=str)
def test_what_is_read_from_the_source_is_what_runs(need):
    module, attribute = need.name, []
    while True:
        try:
            found = importlib.import_module(module)
            break
        except ModuleNotFoundError:
            module, _, last = module.rpartition(".")
            attribute.insert(0, last)
    for name in attribute:
        found = getattr(found, name)
    assert tuple(inspect.signature(found).parameters)[: len(need.parameters)] == need.parameters


def test_a_name_that_moved_is_named_with_the_plugin_that_used_it(tmp_path):
    package = tmp_path / "vllm"
    package.mkdir()
    (package / "thing.py").write_text(
        "class Queue:\n    size: int\n    def add(self, item, place): self.last = item\ndef f(b, a): ...\n"
    )
    surface = {name: contract._describe(tmp_path, name.split(".")) for name in ("vllm.thing.Queue", "vllm.thing.f")}
    surface["vllm.thing.gone"] = contract._describe(tmp_path, ["vllm", "thing", "gone"])

    def faults(need: Need) -> list[str]:
        return list(contract.faults(need, surface))

    assert faults(Need("vllm.thing.Queue", "us", attributes=("size", "last", "add"))) == []
    assert faults(Need("vllm.thing.Queue", "us", attributes=("depth",))) == [
        "vllm.thing.Queue has no depth; us uses it"
    ]
    assert faults(Need("vllm.thing.f", "us", ("a", "b"))) == ["vllm.thing.f takes (b, a), us expects (a, b, ...)"]
    assert faults(Need("vllm.thing.gone", "us")) == ["vllm.thing.gone is gone; us uses it"]
