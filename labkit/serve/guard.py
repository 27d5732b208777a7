"""Stands between a server and the process that wants it, and outlives neither.

Run as a script, with nothing but the standard library: `guard.py OWNER COMMAND...` starts the command with a scratch
folder as its TMPDIR and waits until the command ends, stdin closes, or process OWNER is gone, however it went. Then it
ends the command with all that the command started, and removes the folder. Orphans of the command become children of
this process (PR_SET_CHILD_SUBREAPER), so none is missed, whatever process group it has made for itself.

Two guards run, one below the other, each the keeper of the other: the first starts the second, and the second the
command. If one is killed, even by SIGKILL, the other ends the rest.
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

PR_SET_PDEATHSIG, PR_SET_NAME, PR_SET_CHILD_SUBREAPER = 1, 15, 36
NAME = b"labkit-guard"  # who kills all that is named python shall not kill what cleans up after that
GRACE_S = 8.0  # for a server that is asked to stop
TRACKER_S = 2.0  # for multiprocessing's tracker, which removes shared memory that killed processes held
MAX_TEMP = 45  # characters: a socket's path, of which vLLM makes 58 more, has at most 107
SECOND = "--second"
TRACKER = b"multiprocessing.resource_tracker"


def main(owner: int, command: list[str], scratch: str = "") -> int:
    """The command's exit status, or 0 if it was told to end. scratch: of the first guard, "" if this is the first."""
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    prctl(PR_SET_NAME, NAME, 0, 0, 0)
    wake, woken = os.pipe()
    signal.signal(signal.SIGTERM, lambda *_: os.write(woken, b"x"))
    for ignored in (signal.SIGINT, signal.SIGHUP):  # interrupting a notebook is not stopping its server
        signal.signal(ignored, signal.SIG_IGN)
    second, grace = bool(scratch), GRACE_S
    if not second:
        short = len(tempfile.gettempdir()) < MAX_TEMP
        scratch = tempfile.mkdtemp(prefix="labkit-serve-", dir=None if short else "/tmp")
        command = [sys.executable, "-I", "-S", __file__, SECOND, scratch, str(os.getpid()), *command]
        grace += TRACKER_S + 1  # the second one's own
    child = None
    try:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(owner)
        if os.getppid() != owner:
            return 0  # it was gone before we looked
        child = subprocess.Popen(
            command,
            env={**os.environ, "TMPDIR": scratch},
            stdin=subprocess.DEVNULL if second else 0,
            start_new_session=True,  # else who kills a group would kill both guards
            preexec_fn=(lambda: prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)) if second else None,
        )
        done = os.pidfd_open(child.pid)
        ready, _, _ = select.select([ended, done, wake, 0], [], [])
        if done in ready:
            return child.wait()
        if ended not in ready:  # the owner is there and asked for it: let requests be answered with an error
            child.terminate()
            select.select([ended, done], [], [], grace)
        return 0
    finally:
        end_all(child)
        shutil.rmtree(scratch, ignore_errors=True)


def end_all(child: subprocess.Popen | None) -> None:
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
    if child is not None:
        child.returncode = child.returncode or 0  # reaped above, so that Popen must not wait for it


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
    arguments = sys.argv[1:]
    folder = arguments[1] if arguments[0] == SECOND else ""
    mine = arguments[2:] if folder else arguments
    sys.exit(main(int(mine[0]), mine[1:], folder))
