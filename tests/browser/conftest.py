"""A student's JupyterLab, started by `labkit start`, and a real headless Chromium to look at it."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

LAB = "lab1_paged_attention"
# Without a display, as root, and with none of the connections that a fresh Chromium makes on its own.
FLAGS = [
    *("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
]
# The page's own application object, so that a test can ask which extensions it has and run a chosen cell.
OPTIONS = ["--no-browser", "--LabApp.expose_app_in_browser=True"]


def chromium() -> str | None:
    """Path of a Chromium or Chrome, or None."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def what_is_missing() -> list[str]:
    """What the browser tests need and this machine lacks."""
    packages = [name for name in ("playwright", "jupyterlab", "nbgrader") if importlib.util.find_spec(name) is None]
    return packages + ([] if chromium() else ["chromium"])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    missing = what_is_missing()
    for item in items:
        if missing and Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=f"needs {', '.join(missing)}"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    left_out = [r for r in terminalreporter.stats.get("skipped", []) if r.nodeid.startswith("tests/browser/")]
    if left_out:
        why = f"install {', '.join(what_is_missing())}"
        terminalreporter.write_line(f"BROWSER: {len(left_out)} tests of JupyterLab were LEFT OUT: {why}.", red=True)


@dataclass(frozen=True)
class StudentLab:
    """A running JupyterLab: its address with the token, the student's notebook, CPU seconds until it answered."""

    url: str
    notebook: Path
    cpu_seconds: float

    @property
    def base(self) -> str:
        return self.url.split("/lab/")[0]

    @property
    def token(self) -> str:
        return self.url.partition("?token=")[2]


def cpu_seconds(pid: int) -> float:
    """CPU time that a process and its children took so far: as long as a start takes on a machine with nothing else."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK") + sum(map(cpu_seconds, map(int, children)))


@pytest.fixture(scope="session")
def student_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StudentLab]:
    folder = tmp_path_factory.mktemp("student")
    env = os.environ | {"JUPYTER_CONFIG_DIR": str(folder / "config"), "JUPYTER_DATA_DIR": str(folder / "data")}
    command = [sys.executable, "-m", "labkit.cli", "start", LAB, "--work", str(folder / "work"), *OPTIONS]
    with open(folder / "log", "w") as log:
        process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert process.stdout
        said = ""
        for line in process.stdout:
            said += line
            if found := re.search(r"http://127\.0\.0\.1:\d+/lab/tree/\S+\?token=\w{20,}", line):
                yield StudentLab(found[0], folder / "work" / LAB / f"{LAB}.ipynb", cpu_seconds(process.pid))
                break
        else:
            pytest.fail(f"`labkit start` ended without an address:\n{said}\n{(folder / 'log').read_text()}")
    finally:
        process.terminate()
        process.wait(30)


@pytest.fixture
def page(student_lab: StudentLab, tmp_path: Path):
    """The student's notebook open in Chromium, its kernel ready."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        context = driver.chromium.launch_persistent_context(
            tmp_path / "profile", executable_path=chromium(), args=FLAGS, viewport={"width": 1400, "height": 1000}
        )
        context.set_default_timeout(90_000)
        tab = context.pages[0]
        try:
            tab.goto(student_lab.url)
            tab.wait_for_selector(".jp-Notebook .jp-Cell")
            tab.wait_for_selector("#jupyterlab-splash", state="detached")
            tab.wait_for_function(
                "() => ['idle', 'busy'].includes("
                "window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status)"
            )
            yield tab
        finally:
            context.close()
