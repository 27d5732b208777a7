"""The box that a student's kernel runs in: bubblewrap, no network, nothing of the course but labkit and kernels.

The trusted process sees files and the gradebook; the kernel sees the system's libraries, the Python environment, a copy
of labkit and kernels without the answers that they ship, and the lab's data files. https://github.com/containers/bubblewrap
"""

from __future__ import annotations

import compileall
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

from grading.course import ROOT, Course
from labkit.checks import questions_of

GB = 1 << 30
INSIDE = "/camp"  # where the sandbox shows labkit and kernels
HOME = "/tmp/home"
DESK = "/tmp/lab"  # the kernel's working folder: writable, gone afterwards
SYSTEM = (
    "/usr",
    "/bin",
    "/sbin",
    "/lib",
    "/lib64",
    "/etc/alternatives",
    "/etc/ld.so.cache",
    "/etc/fonts",
    "/etc/passwd",
)


@dataclass(frozen=True)
class Limits:
    """What one kernel may take. memory_gb is address space, and is not applied where a CUDA device is used (its driver
    reserves far more than it uses). cpu_s counts all threads. file_mb is the size of one file, disk_mb of all, and
    runtime_mb of those beside the sockets, which lie on the host's disk. tasks: processes and threads; Linux counts
    them for each user namespace from 5.14 on, and does not hold root to it."""

    memory_gb: float = 8.0
    cpu_s: int = 3600
    file_mb: int = 256
    disk_mb: int = 1024
    runtime_mb: int = 64
    tasks: int = 512


@functools.cache
def unavailable() -> str:
    """Why no sandbox can be had here, or "" if it can: one try, since containers often forbid it."""
    for tool in ("bwrap", "prlimit"):
        if not shutil.which(tool):
            return f"{tool} is not installed"
    links = [a for p in SYSTEM if os.path.exists(p) for a in ("--ro-bind", p, p)]
    trial = ["bwrap", "--unshare-all", *links, "--proc", "/proc", "--dev", "/dev", "true"]
    done = subprocess.run(trial, capture_output=True, text=True)
    return "" if done.returncode == 0 else f"bwrap does not work here: {done.stderr.strip()[:200]}"


def masked_modules(lab: str) -> list[str]:
    """The modules that hold an answer to a question of this lab."""
    return sorted({module for question in questions_of(lab) for module in question.shipped})


def camp_copy(course: Course, lab: str, target: Path) -> Path:
    """Copy labkit and kernels to `target` without the shipped answers of this lab, compiled, and give `target`.

    Other labs' checks stay out as well: they may import what is an answer in this lab.
    ValueError when a shipped module is not there: a mask that misses would be worse than none.
    """
    skip = shutil.ignore_patterns("__pycache__", "*.pyc")
    for root in dict.fromkeys((ROOT, course.root)):
        for package in ("labkit", "kernels"):
            if (root / package).is_dir():
                shutil.copytree(root / package, target / package, ignore=skip, dirs_exist_ok=True)
    for other in (target / "labkit" / "checks").glob("lab*"):
        if other.name != lab:
            shutil.rmtree(other)
    for module in masked_modules(lab):
        place = target.joinpath(*module.split("."))
        if place.with_suffix(".py").exists():
            place.with_suffix(".py").unlink()
        elif place.is_dir():
            shutil.rmtree(place)
        else:
            raise ValueError(f"a question of {lab} lists {module!r} as shipped, and there is no such module")
    compileall.compile_dir(target, quiet=2, stripdir=str(target), prependdir=INSIDE)
    return target


def cuda_devices() -> list[str]:
    """Device files of NVIDIA's driver, empty where there is none."""
    return sorted(
        str(p) for pattern in ("nvidia*", "nvidia-caps/*") for p in Path("/dev").glob(pattern) if not p.is_dir()
    )


@dataclass(frozen=True)
class Box:
    """How to start one kernel. camp: what camp_copy made. data: folder of the lab's data files. runtime: sockets.

    hidden: folders of camp that are empty in the box. Without isolation they are not.
    """

    camp: Path
    data: Path
    files: tuple[Path, ...]
    runtime: Path
    isolated: bool
    limits: Limits = Limits()
    gpu: str = ""  # value for CUDA_VISIBLE_DEVICES, if one is to be chosen
    hidden: tuple[str, ...] = ()

    def command(self) -> list[str]:
        """The kernel's argv, with {connection_file} for Jupyter to fill in."""
        kernel = ["-m", "ipykernel_launcher", "-f", "{connection_file}", "--HistoryManager.hist_file=:memory:"]
        if not self.isolated:
            return [sys.executable, *kernel]
        inner = ["prlimit", f"--nproc={self.limits.tasks}"]  # inside, where only the box's own tasks count
        return [*self._limits(), *self._bwrap(), *inner, sys.executable, *kernel]

    def environment(self) -> dict[str, str]:
        """What the kernel gets of the environment: nothing is inherited, so no credential of the grader's leaks."""
        home, camp = (HOME, INSIDE) if self.isolated else (str(self.runtime), str(self.camp))
        fixed = {
            "HOME": home, "PYTHONPATH": camp, "MPLCONFIGDIR": f"{home}/mpl", "IPYTHONDIR": f"{home}/ipython",
            "PATH": f"{Path(sys.executable).parent}:/usr/local/cuda/bin:/usr/bin:/bin", "LANG": "C.UTF-8",
            "JUPYTER_RUNTIME_DIR": str(self.runtime), "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": "1",
            "PYTHONWARNINGS": "ignore", "NBGRADER_EXECUTION": "autograde", "OMP_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }  # fmt: skip
        return fixed | ({"CUDA_VISIBLE_DEVICES": self.gpu} if self.gpu else {})

    def _limits(self) -> list[str]:
        mb = 1 << 20
        limits = [
            "prlimit",
            "--core=0",
            "--nofile=1024",
            f"--cpu={self.limits.cpu_s}",
            f"--fsize={self.limits.file_mb * mb}",
        ]
        return limits if cuda_devices() else [*limits, f"--as={int(self.limits.memory_gb * GB)}"]

    def _bwrap(self) -> list[str]:
        argv = ["bwrap", "--unshare-all", "--unshare-user", "--uid", "65534", "--gid", "65534", "--cap-drop", "ALL"]
        argv += ["--die-with-parent", "--new-session", "--clearenv", "--proc", "/proc", "--dev", "/dev"]
        size = str(self.limits.disk_mb << 20)
        argv += ["--size", size, "--tmpfs", "/tmp", "--dir", HOME, "--dir", DESK]
        for path in (*SYSTEM, *_python_trees(), "/sys" if cuda_devices() else "/sys/devices/system"):
            if os.path.exists(path):
                argv += ["--ro-bind", path, path]
        for path in _installed_copies():  # an installed wheel of ours would hold what the copy leaves out
            argv += ["--tmpfs", path]
        for device in cuda_devices():
            argv += ["--dev-bind", device, device]
        argv += ["--ro-bind", str(self.camp), INSIDE, "--bind", str(self.runtime), str(self.runtime), "--chdir", DESK]
        for folder in self.hidden:
            argv += ["--tmpfs", f"{INSIDE}/{folder}"]
        for name in self.files:
            argv += ["--ro-bind", str(self.data / name), f"{DESK}/{name}"]
        for key, value in self.environment().items():
            argv += ["--setenv", key, value]
        return argv


def _python_trees() -> list[str]:
    """The environment and the Python it was made from, which need not lie under /usr."""
    return list(dict.fromkeys([sys.prefix, os.path.realpath(sys.base_prefix)]))


def _installed_copies() -> list[str]:
    site = Path(sysconfig.get_paths()["purelib"])
    return [str(site / name) for name in ("labkit", "kernels", "grading") if (site / name).is_dir()]
