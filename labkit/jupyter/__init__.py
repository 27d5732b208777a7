"""JupyterLab as a student has it: on the loopback interface, behind a token, without the instructor's tools.

`student/` holds the profile: nbgrader's formgrader, course list and assignment creator are switched off, and Validate
too, since it runs the whole notebook inside the server, which answers nobody meanwhile.
"""

from __future__ import annotations

import importlib.util
import json
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

PROFILE = Path(__file__).parent / "student"
START_TIMEOUT = 120.0  # seconds; the first start of a machine reads some hundred megabytes from disk


def command(notebook: Path, folder: Path, options: list[str]) -> list[str]:
    """The command that opens `notebook` in a JupyterLab that shows `folder`. `options` come last and win."""
    root = ["--allow-root"] if hasattr(os, "geteuid") and os.geteuid() == 0 else []  # usual on GPU instances
    return [
        *(sys.executable, "-m", "jupyterlab", "--ServerApp.ip=127.0.0.1", "--ServerApp.log_level=WARN"),
        f"--ServerApp.root_dir={folder}",
        f"--LabApp.default_url=/lab/tree/{notebook.relative_to(folder).as_posix()}",
        *root,
        *options,
    ]


def environment(camp: Path) -> dict[str, str]:
    """The environment of that JupyterLab: the student's profile, a token, and a camp that notebooks can import."""
    env = dict(os.environ)
    env["JUPYTER_CONFIG_PATH"] = _joined(str(PROFILE), env.get("JUPYTER_CONFIG_PATH"))
    env["JUPYTER_TOKEN"] = env.get("JUPYTER_TOKEN") or secrets.token_hex(24)
    package = Path(__file__).resolve().parents[2]
    if package == camp.resolve():  # not installed elsewhere: a notebook's own folder is not the camp's
        env["PYTHONPATH"] = _joined(str(package), env.get("PYTHONPATH"))
    return env


def _joined(first: str, rest: str | None) -> str:
    return os.pathsep.join(filter(None, (first, rest)))


def is_installed() -> bool:
    """Whether JupyterLab can be started from this Python."""
    return importlib.util.find_spec("jupyterlab") is not None


def serve(notebook: Path, folder: Path, camp: Path, options: list[str], say: Callable[[str], None]) -> int:
    """Run JupyterLab until it ends; `say` gets the URL once it answers. Gives its exit code.

    Ctrl-C reaches JupyterLab, which asks before it ends; a SIGTERM to this process is passed on.
    """
    process = subprocess.Popen(command(notebook, folder, options), env=environment(camp))
    before = {
        signal.SIGINT: signal.signal(signal.SIGINT, signal.SIG_IGN),
        signal.SIGTERM: signal.signal(signal.SIGTERM, lambda *_: process.terminate()),
    }
    try:
        if url := _wait_for_url(process, notebook.relative_to(folder)):
            say(url)
        return process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
        for number, handler in before.items():
            signal.signal(number, handler)


def _wait_for_url(process: subprocess.Popen, notebook: Path) -> str:
    """The address of the notebook with its token, or "" if the server ended, or says nothing of itself in time."""
    from jupyter_core.paths import jupyter_runtime_dir

    info = Path(jupyter_runtime_dir()) / f"jpserver-{process.pid}.json"
    info.unlink(missing_ok=True)  # of a killed server that had the same number: ours is not up this soon
    deadline = time.monotonic() + START_TIMEOUT
    while process.poll() is None and time.monotonic() < deadline:
        try:
            server = json.loads(info.read_text(encoding="utf-8"))
            return f"{server['url']}lab/tree/{notebook.as_posix()}?token={server['token']}"
        except (OSError, ValueError, KeyError):  # not there yet, or half written
            time.sleep(0.1)
    return ""
