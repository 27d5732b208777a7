"""A process in which kernels are interpreted, for machines where they are compiled. It forks for each request.

It starts with the first request, since importing torch takes seconds, and ends with the process that started it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
from multiprocessing.connection import Connection
from typing import Any

from labkit import cells
from labkit.meter import child

START_S = 60.0  # importing torch on a loaded machine
_running: dict[int, tuple[subprocess.Popen, Connection]] = {}  # by process id: a fork must not share its parent's


def request(sources: list, arguments: list, shuffle: int | None, timeout: float) -> bytes:
    """Run the calls in the server and give its packed reply. TimeoutError, or RuntimeError when a process died."""
    _, connection = _running.get(os.getpid()) or _start()
    connection.send_bytes(child.pack((sources, arguments, shuffle, timeout)))
    try:
        if not connection.poll(timeout + START_S):
            raise TimeoutError(f"no reply after {timeout + START_S:.0f} s")
        kind, reply = child.unpack(connection.recv_bytes())
    except (TimeoutError, EOFError, ConnectionError) as error:
        _stop(os.getpid())
        raise error if isinstance(error, TimeoutError) else RuntimeError("the meter's process died") from error
    if kind != "reply":
        raise (TimeoutError if kind == "TimeoutError" else RuntimeError)(reply)
    return reply


def _start() -> tuple[subprocess.Popen, Connection]:
    ours, theirs = socket.socketpair()
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-c", f"from labkit.meter import server; server.serve({theirs.fileno()})"]
    process = subprocess.Popen(command, env=environment, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
    theirs.close()
    started = process, Connection(ours.detach())
    _running[os.getpid()] = started
    atexit.register(_stop, os.getpid())
    return started


def _stop(owner: int) -> None:
    if owner == os.getpid() and owner in _running:
        process, connection = _running.pop(owner)
        connection.close()  # the server ends when its pipe does
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()


def serve(descriptor: int) -> None:
    """In the server: answer requests until the other end of the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupting a notebook reaches its whole process group
    connection = Connection(descriptor)
    with contextlib.suppress(EOFError):
        while True:
            sources, arguments, shuffle, timeout = child.unpack(connection.recv_bytes())
            connection.send_bytes(child.pack(_answer(sources, arguments, shuffle, timeout)))


def _answer(sources: list, arguments: list, shuffle: int | None, timeout: float) -> tuple[str, Any]:
    try:
        return "reply", cells.forked(lambda: child.run_calls(sources, arguments, shuffle), timeout)
    except (TimeoutError, RuntimeError) as error:
        return type(error).__name__, str(error)
