"""Nothing that a server starts outlives who wanted it: tried with processes that resist."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from labkit.serve import guard
from tests.serve.processes import left_over

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the guard is made of Linux's system calls")

# A server that ignores SIGTERM, with a child in a session of its own that does too, and a file in its temporary folder.
STUBBORN = """
import os, signal, subprocess, sys, tempfile, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
open(os.path.join(tempfile.gettempdir(), "socket"), "w").close()
print(os.getpid(), child.pid, tempfile.gettempdir(), flush=True)
time.sleep(600)
"""
OWNER = """
import os, subprocess, sys, time
guard, code = sys.argv[1:]
process = subprocess.Popen(
    [sys.executable, "-I", "-S", guard, str(os.getpid()), sys.executable, "-c", code],
    stdin=subprocess.PIPE, start_new_session=True,
)
print(process.pid, flush=True)
time.sleep(600)
"""


def started(code: str = OWNER) -> tuple[subprocess.Popen[str], list[int], Path]:
    """An owner, the processes below it, and the temporary folder of its server."""
    owner = subprocess.Popen([sys.executable, "-c", code, guard.__file__, STUBBORN], stdout=subprocess.PIPE, text=True)
    assert owner.stdout is not None
    of_guard = int(owner.stdout.readline())
    server, child, folder = owner.stdout.readline().split()
    return owner, [of_guard, int(server), int(child)], Path(folder)


def end(pids: list[int]) -> None:
    """Kill what is there of them."""
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_killed_owner_leaves_no_process_and_no_file():
    owner, pids, folder = started()
    try:
        assert folder.name.startswith("labkit-serve-") and (folder / "socket").exists()
        owner.kill()
        owner.wait()
        assert not left_over(pids, [folder]), "it outlived the owner: is process OWNER watched, and all of it killed?"
    finally:
        end(pids)


def test_a_fork_that_holds_the_pipe_open_does_not_keep_the_server():
    owner, pids, folder = started(OWNER.replace("time.sleep(600)", "time.sleep(600 if os.fork() else 8)"))
    owner.kill()
    owner.wait()
    assert not left_over(pids, [folder]), "the pipe's end was waited for, and a fork of the owner holds it"


def guarded(code: str) -> subprocess.Popen[str]:
    """A guard of this process with a Python program."""
    return subprocess.Popen(
        [sys.executable, "-I", "-S", guard.__file__, str(os.getpid()), sys.executable, "-c", code],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True,
    )  # fmt: skip


def test_a_server_that_ends_by_itself_takes_its_children_along():
    process = guarded(STUBBORN.removesuffix("time.sleep(600)\n") + "sys.exit(3)\n")
    assert process.stdout is not None
    server, child, folder = process.stdout.readline().split()
    assert process.wait(10) == 3
    assert not left_over([int(server), int(child)], [folder], 1)


def test_an_owner_that_is_gone_before_the_guard_looks_is_no_error():
    gone_before = subprocess.Popen([sys.executable, "-c", ""])
    gone_before.wait()
    done = subprocess.run(
        [sys.executable, "-I", "-S", guard.__file__, str(gone_before.pid), sys.executable, "-c", STUBBORN],
        input="", capture_output=True, text=True, timeout=20,
    )  # fmt: skip
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_long_temporary_folder_is_passed_over_for_sockets(tmp_path, monkeypatch):
    (tmp_path / ("long" * 12)).mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / ("long" * 12)))
    process = guarded("import tempfile; print(tempfile.gettempdir())")
    assert process.stdout is not None
    folder = process.stdout.readline().strip()
    assert process.wait(10) == 0
    assert folder.startswith("/tmp/labkit-serve-") and not Path(folder).exists()


@pytest.mark.parametrize("which", ["first", "second", "server"])
def test_whichever_of_the_guards_or_the_server_is_killed_the_rest_ends(which):
    process = guarded(STUBBORN)
    assert process.stdout is not None
    server, child, folder = process.stdout.readline().split()
    first, second = process.pid, guard.descendants(process.pid)[0]
    os.kill({"first": first, "second": second, "server": int(server)}[which], signal.SIGKILL)
    process.wait(5)
    try:
        left = left_over([second, int(server), int(child)], [folder])
        assert not left, f"{which} was killed, and {left} outlived it"
    finally:
        end([int(server), int(child)])


def test_who_kills_all_that_is_named_python_leaves_nothing():
    owner, _, folder = started()
    family = [owner.pid, *guard.descendants(owner.pid)]
    assert len(family) == 5, "owner, two guards, server and its child"
    named = [pid for pid in family if Path(f"/proc/{pid}/comm").read_text(encoding="utf-8").startswith("python")]
    end(named)  # the guards may be faster with some of them
    owner.wait()
    assert not left_over(family[1:], [folder])


def test_a_group_that_is_killed_holds_one_guard_only():
    process = guarded(STUBBORN)
    assert process.stdout is not None
    server, child, folder = process.stdout.readline().split()
    os.killpg(process.pid, signal.SIGKILL)
    process.wait(5)
    try:
        assert not left_over([int(server), int(child)], [folder]), "both guards were in the group, and ended together"
    finally:
        end([int(server), int(child)])
