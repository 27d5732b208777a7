"""Stands between a server and the process that wants it, and outlives neither.

Run as a script, with nothing but the standard library: `guard.py OWNER COMMAND...` starts the command with a scratch
folder as its TMPDIR and waits until the command ends, stdin closes, or process OWNER is gone, however it went. Then it
ends the command with all that the command started, and removes the folder. Orphans of the command become children of
this process (PR_SET_CHILD_SUBREAPER), so none is missed, whatever process group it has made for itself.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
GRACE_S = 8.0  # for a server that is asked to stop
TRACKER_S = 2.0  # for multiprocessing's tracker, which removes shared memory that killed processes held
MAX_TEMP = 45  # characters: a socket's path, of which vLLM makes 58 more, has at most 107
TRACKER = b"multiprocessing.resource_tracker"


def main(owner: int, command: list[str]) -> int:
    """The command's exit status, or 0 if it was told to end."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    wake, woken = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(woken, b"x"))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # interrupting a notebook is not stopping its server
        signal.signal(ignored, signal.SIG_IGN)
    short = len(tempfile.gettempdir()) < MAX_TEMP
    scratch = tempfile.mkdtemp(prefix="labkit-serve-", dir=None if short else "/tmp")
    server = None
    try:
        ended = os.pidfd_open(owner)
        if os.getppid() != owner:
            return 0  # it was gone before we looked
        server = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        )
        done = os.pidfd_open(server.pid)
        ready, _, _ = select.select([ended, done, wake, 0], [], [])
        if done in ready:
            return server.wait()
        if ended not in ready:  # the owner is there and asked for it: let requests be answered with an error
            server.terminate()
            select.select([ended, done], [], [], GRACE_S)
        return 0
    finally:
        end_all(server)
        shutil.rmtree(scratch, ignore_errors=True)


def end_all(server: subprocess.Popen | None) -> None:
    """Kill every descendant of this process, and reap it."""
    deadline = time.monotonic() + TRACKER_S
    while found := descendants(os.getpid()):
        for pid in found:
            if time.monotonic() > deadline or TRACKER not in command_line(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)
    if server is not None:
        server.returncode = server.returncode or 0  # reaped above, so that Popen must not wait for it


def descendants(root: int) -> list[int]:
    """Process ids of all that descend from `root`, zombies included."""
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError), open(f"/proc/{name}/stat", "rb") as file:
                parent = int(file.read().rpartition(b")")[2].split()[1])  # the name before it may hold anything
                children.setdefault(parent, []).append(int(name))
    found, pending = [], [root]
    while pending:
        below = children.get(pending.pop(), [])
        found += below
        pending += below
    return found


def command_line(pid: int) -> bytes:
    """The arguments of a process, b"" if it is gone."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/cmdline", "rb") as file:
        return file.read()
    return b""


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
