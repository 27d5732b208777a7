"""Write locks/cpu.txt and locks/cuda.txt from pyproject.toml, and prove that each can be installed where we say it can.

    make locks                   keeps what is locked, adds what is missing
    make locks UPGRADE=1         takes the newest releases that pyproject.toml and locks/*.in admit

For a maintainer only; set-up never resolves anything. locks/torch-cpu.txt and locks/models.txt say themselves why they
are written by hand. Needs uv on the path or in the environment. uv does not read
pip's configuration: a mirror or a wheel folder is passed in uv's own variables (UV_DEFAULT_INDEX, UV_FIND_LINKS).

The proof is a dry run per flavour, Python and processor: a full resolution with the lock as the only source of
versions and hashes and wheels as the only source of metadata. It downloads metadata only, and fails when a requirement
of a locked distribution is missing from the lock or has no wheel there. What it found is kept in locks/resolved.json,
with the digest of the lock that it was run on.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCKS = ROOT / "locks"
FLAVOURS = ("cpu", "cuda")
EXTRAS = ("lab", "grading", "test")
PYTHONS = ("3.11", "3.12", "3.13")
# The oldest glibc that has a wheel of everything: llguidance asks for 2.31, tilelang's wheel for ARM for a newer one.
PLATFORMS = {
    "cpu": ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31"),
    "cuda": ("x86_64-manylinux_2_31", "aarch64-manylinux_2_39"),
}


def inputs_digest(flavour: str) -> str:
    """SHA-256 of all that the lock of `flavour` is made from: a lock that holds another one is out of date."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = {name: project["optional-dependencies"][name] for name in (*EXTRAS, flavour)}
    digest = hashlib.sha256(json.dumps([project["requires-python"], project["dependencies"], extras]).encode())
    for path in sorted(LOCKS.glob(f"{flavour}.in")) + sorted(LOCKS.glob(f"{flavour}-overrides.txt")):
        digest.update(path.read_bytes())
    return digest.hexdigest()


def lock_digest(flavour: str) -> str:
    """SHA-256 of the lock file of `flavour`."""
    return hashlib.sha256((LOCKS / f"{flavour}.txt").read_bytes()).hexdigest()


def uv(*args: str | Path, find_links: bool = True) -> subprocess.CompletedProcess[str]:
    """Run uv and give what it said. `find_links=False` hides local wheel folders, which hold CPU builds of torch."""
    beside = Path(sys.executable).with_name("uv")
    program = str(beside) if beside.exists() else shutil.which("uv")
    if program is None:
        raise SystemExit("lock: uv is missing; `pip install uv`, then again")
    environment = {k: v for k, v in os.environ.items() if find_links or k != "UV_FIND_LINKS"}
    return subprocess.run([program, *map(str, args)], cwd=ROOT, env=environment, text=True, capture_output=True)


def compile_lock(flavour: str, upgrade: bool) -> None:
    """Resolve for every Linux Python at once (markers in the lock tell them apart) and write locks/<flavour>.txt."""
    target = LOCKS / f"{flavour}.txt"
    args: list[str | Path] = ["pip", "compile", "--quiet", "pyproject.toml", f"locks/{flavour}.in"]
    for extra in (*EXTRAS, flavour):
        args += ["--extra", extra]
    args += ["--universal", "--python-version", PYTHONS[0], "--fork-strategy", "fewest"]
    args += ["--generate-hashes", "--no-annotate", "--no-header", "--no-emit-index-url", "--no-emit-find-links"]
    if flavour == "cpu":  # torch has a list of its own, since its hashes are on another index
        args += ["--override", "locks/cpu-overrides.txt", "--no-emit-package", "torch"]
    if upgrade:
        args += ["--upgrade"]
    with tempfile.TemporaryDirectory() as folder:  # so that a failed resolution leaves the old lock as it was
        draft = Path(folder) / target.name
        if target.exists():
            shutil.copy(target, draft)
        done = uv(*args, "--output-file", draft, find_links=flavour == "cpu")
        if done.returncode:
            raise SystemExit(f"lock: {flavour} does not resolve\n{done.stderr}")
        head = f"# The {flavour} flavour, written by `make locks`: change pyproject.toml or {flavour}.in instead.\n"
        target.write_text(f"{head}# made from {inputs_digest(flavour)}\n{draft.read_text(encoding='utf-8')}")


def prove(flavour: str, python: str, platform: str) -> int:
    """Number of packages that the lock installs there. Raises SystemExit with uv's reason when it does not resolve."""
    with tempfile.TemporaryDirectory() as folder:
        args: list[str | Path] = ["pip", "install", "--dry-run", "--target", folder, "--python-version", python]
        args += [
            "--python-platform",
            platform,
            "--only-binary",
            ":all:",
            "--require-hashes",
            "-r",
            f"locks/{flavour}.txt",
        ]
        if flavour == "cpu":  # torch comes from its own list, which is checked when it is installed
            overrides = Path(folder) / "overrides.txt"
            ours = (LOCKS / "cpu-overrides.txt").read_text(encoding="utf-8")
            overrides.write_text(f'{ours}torch ; sys_platform == "never"\n')
            args += ["--override", overrides]
        done = uv(*args, find_links=False)
    if done.returncode:
        raise SystemExit(f"lock: {flavour} does not install on Python {python}, {platform}\n{done.stderr}")
    return sum(line.startswith(" + ") for line in done.stderr.splitlines())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--upgrade", action="store_true", help="take the newest releases that are admitted")
    parser.add_argument("--prove", action="store_true", help="leave the locks as they are and only run the proof again")
    options = parser.parse_args()
    record = {}
    for flavour in FLAVOURS:
        if not options.prove:
            compile_lock(flavour, options.upgrade)
        cases = [(python, platform) for python in PYTHONS for platform in PLATFORMS[flavour]]
        packages = {f"Python {python}, {platform}": prove(flavour, python, platform) for python, platform in cases}
        record[flavour] = {"lock": lock_digest(flavour), "packages": packages}
        for case, count in packages.items():
            print(f"{flavour}: {count} packages, {case}")
    (LOCKS / "resolved.json").write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
