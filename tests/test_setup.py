"""Set-up: what it decides, what it refuses, and what it runs."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import zipfile
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import pytest

from tools import set_up

ROOT = Path(__file__).resolve().parents[1]
GPU_LOCK = (ROOT / "locks/cuda.txt").read_text(encoding="utf-8")
SMI = "| NVIDIA-SMI 580.95.05    Driver Version: 580.95.05    CUDA Version: 13.0     |\n|   0  NVIDIA H200"


def test_the_flavour_follows_the_gpu_and_can_be_overridden():
    assert set_up.pick_flavour("auto", "", GPU_LOCK) == "cpu"
    assert set_up.pick_flavour("auto", SMI, GPU_LOCK) == "cuda"
    assert set_up.pick_flavour("cpu", SMI, GPU_LOCK) == "cpu"
    assert set_up.pick_flavour("cuda", "", GPU_LOCK) == "cuda"


def test_a_driver_for_an_older_cuda_is_refused_before_anything_is_downloaded():
    old = SMI.replace("13.0", "12.2")
    with pytest.raises(set_up.SetupError, match=r"for CUDA 12\.2, the lock's torch for CUDA 13"):
        set_up.pick_flavour("auto", old, GPU_LOCK)
    assert set_up.pick_flavour("cuda", old, GPU_LOCK) == "cuda", "with cuda-compat it works: who asks for it gets it"


def test_what_breaks_the_camp_is_named_with_its_cure():
    (said,) = set_up.clashes({"kernels": "0.16.0", "torch": "2.13.0"}, "cuda")
    assert "kernels 0.16.0 is installed" in said and "pip uninstall -y kernels" in said
    assert len(set_up.clashes({"torchvision": "0.28.0", "torchaudio": "2.11.1"}, "cpu")) == 2
    assert (
        set_up.clashes({"torchvision": "0.28.0"}, "cuda") == [] == set_up.clashes({"torchvision": "0.28.0+cpu"}, "cpu")
    )


def fake_environment(folder: Path, *dists: str) -> Path:
    """An environment with a Python that starts and empty distributions ("kernels-0.16.0")."""
    (folder / "bin").mkdir(parents=True)
    (folder / "bin/python").symlink_to(sys.executable)
    for dist in dists:
        info = folder / "lib/python3.11/site-packages" / f"{dist}.dist-info"
        info.mkdir(parents=True)
        name, version = dist.rsplit("-", 1)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    return folder


def test_set_up_refuses_an_environment_with_hugging_faces_kernels(tmp_path):
    venv = fake_environment(tmp_path / "venv", "kernels-0.16.0")
    command = [sys.executable, ROOT / "tools/set_up.py", "--flavour", "cpu", "--venv", venv]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1 and done.stderr.startswith("set-up: kernels 0.16.0 is installed")
    assert f"{venv}/bin/python -m pip uninstall -y kernels" in done.stderr and "Traceback" not in done.stderr


def options(venv: Path, flavour: str = "cpu") -> SimpleNamespace:
    return SimpleNamespace(venv=str(venv), flavour=flavour, torch_cpu_index="https://cpu.example")


@pytest.fixture
def commands(monkeypatch) -> list[str]:
    """The commands that set-up would run, recorded instead of run."""
    ran: list[str] = []
    monkeypatch.setattr(set_up, "run", lambda command, extra=None: ran.append(" ".join(map(str, command))))
    return ran


def test_a_second_set_up_runs_nothing_and_a_changed_project_only_installs_itself(tmp_path, commands):
    venv = fake_environment(tmp_path / "venv")
    set_up.set_up(options(venv))
    assert len(commands) == 4, commands  # torch, the lock, vLLM's metadata, the camp
    assert commands[1].count("locks/models.txt") == 1, "SmolLM2's wheel comes with the lock"
    del commands[:]
    set_up.set_up(options(venv))
    assert commands == []

    stamp = json.loads((venv / "inference-camp.json").read_text())
    (venv / "inference-camp.json").write_text(json.dumps({**stamp, "project": "another pyproject.toml"}))
    set_up.set_up(options(venv))
    assert len(commands) == 1 and "--editable" in commands[0]


def test_an_interrupted_set_up_is_taken_up_again(tmp_path, commands, monkeypatch):
    venv = fake_environment(tmp_path / "venv")

    def interrupted(*args, **kwargs):
        raise KeyboardInterrupt

    (venv / "inference-camp.json").write_text(json.dumps({"flavour": "cpu", "lock": "an older lock"}))
    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(set_up, "run", interrupted)
        set_up.set_up(options(venv))
    assert not (venv / "inference-camp.json").exists(), "the old lock would be taken for what is installed"
    set_up.set_up(options(venv))
    assert len(commands) == 4, commands


def test_what_has_left_the_lock_is_removed_and_what_a_student_added_is_kept(tmp_path, commands):
    venv = fake_environment(tmp_path / "venv", "left-1.0", "added-1.0")
    set_up.set_up(options(venv))
    stamp = json.loads((venv / "inference-camp.json").read_text())
    old = {**stamp, "lock": "an older lock", "names": [*stamp["names"], "left", "never-here"]}
    (venv / "inference-camp.json").write_text(json.dumps(old))
    del commands[:]
    set_up.set_up(options(venv))
    removed = [command for command in commands if "uninstall" in command]
    assert len(removed) == 1 and removed[0].endswith("uninstall --quiet -y left")


def test_another_flavour_or_a_moved_checkout_makes_a_fresh_environment(tmp_path, commands):
    venv = fake_environment(tmp_path / "venv")
    set_up.set_up(options(venv))
    del commands[:]
    set_up.set_up(options(venv, flavour="cuda"))
    assert "-m venv --clear" in commands[0]
    assert not any("torch-cpu" in command or "vllm-" in command for command in commands), commands
    stamp = json.loads((venv / "inference-camp.json").read_text())
    (venv / "inference-camp.json").write_text(json.dumps({**stamp, "root": "/somewhere/else"}))
    del commands[:]
    set_up.set_up(options(venv, flavour="cuda"))
    assert "-m venv --clear" in commands[0]


def test_an_unsupported_python_is_refused(tmp_path, monkeypatch):
    for version in ((3, 10, 13), (3, 14, 0)):
        monkeypatch.setattr(set_up.sys, "version_info", version)
        with pytest.raises(set_up.SetupError, match=r"Python 3\.11, 3\.12 or 3\.13 is needed"):
            set_up.set_up(options(tmp_path))


@pytest.mark.parametrize("constraint", ["", "torch<=2.14.1\n"])
def test_pip_says_that_no_wheel_is_offered_in_words_that_set_up_knows(tmp_path, constraint):
    (tmp_path / "constraints.txt").write_text(constraint)
    (tmp_path / "wheels").mkdir()
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "wheels"), "PIP_CONFIG_FILE": os.devnull}
    env = {**os.environ, **pip, "PIP_CONSTRAINT": str(tmp_path / "constraints.txt")}
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--quiet", "--no-deps", "--dest", tmp_path]
    done = subprocess.run(
        [*command, "--require-hashes", "-r", ROOT / "locks/torch-cpu.txt"], env=env, capture_output=True, text=True
    )
    assert done.returncode and any(words in done.stderr for words in set_up.NO_WHEEL), done.stderr


@pytest.mark.parametrize("words", set_up.NO_WHEEL)
def test_pytorchs_own_index_is_asked_only_after_pips_configuration_had_no_wheel(tmp_path, monkeypatch, words):
    asked: list[tuple[str, ...]] = []

    def pip(env, *args):
        asked.append(args)
        if "--index-url" not in args:
            raise set_up.SetupError(f"ERROR: {words} for torch==2.13.0+cpu")

    monkeypatch.setattr(set_up.Environment, "pip", pip)
    set_up.install_cpu_torch(set_up.Environment(tmp_path), "https://cpu.example")
    assert len(asked) == 2 and asked[1][:2] == ("--index-url", "https://cpu.example")


def test_a_wheel_with_another_hash_is_an_error_and_not_looked_for_elsewhere(tmp_path, monkeypatch):
    def pip(env, *args):
        assert "--index-url" not in args
        raise set_up.SetupError("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES FROM THE REQUIREMENTS FILE")

    monkeypatch.setattr(set_up.Environment, "pip", pip)
    with pytest.raises(set_up.SetupError, match="DO NOT MATCH"):
        set_up.install_cpu_torch(set_up.Environment(tmp_path), "https://cpu.example")


def test_vllms_metadata_wheel_is_whole_and_says_cpu(tmp_path):
    path = set_up.vllm_metadata_wheel(tmp_path, "0.32.0")
    with zipfile.ZipFile(path) as wheel:
        info = "vllm-0.32.0+cpu.dist-info"
        assert sorted(wheel.namelist()) == [f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL")], "no code"
        for line in wheel.read(f"{info}/RECORD").decode().splitlines():
            name, digest, size = line.split(",")
            if name == f"{info}/RECORD":
                continue
            content = wheel.read(name)
            right = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
            assert digest == f"sha256={right}" and int(size) == len(content)
        wheel.extractall(tmp_path)
    (dist,) = metadata.distributions(path=[str(tmp_path)])
    assert (dist.metadata["Name"], dist.version) == ("vllm", "0.32.0+cpu")
