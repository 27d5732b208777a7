"""Processes kept for what this one cannot do: interpret kernels where they are compiled, and compile where interpreted.

A server starts with the first request, since importing torch takes seconds, and ends with the process that started it.
It listens on a socket, so that what that process forks uses the same server.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import io
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import uuid
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import IO, Any

START_S = 60.0  # importing torch on a loaded machine
BACKLOG = 64  # requests that wait while one is answered


class Server:
    """A process that answers requests with a function of its own, one after another.

    work: "package.module:function", called there with a request's arguments. environment: variables that differ there.
    """

    def __init__(self, work: str, environment: dict[str, str]) -> None:
        self.work = work
        self.environment = environment
        self._address = ""
        self._owner = 0
        self._process: subprocess.Popen | None = None
        self._errors: IO[bytes] | None = None

    def request(self, *arguments: Any, timeout: float) -> Any:
        """What the function gives for `arguments`; raises what it raised.

        timeout: seconds that the function itself may take, to which the server's start is added; it is up to the
        function to keep to it. Raises TimeoutError where it does not, RuntimeError when the server died.
        """
        connection = self._connect()
        try:
            connection.send_bytes(pack(arguments))
            if not connection.poll(timeout + START_S):
                raise TimeoutError(f"no reply after {timeout + START_S:.0f} s")
            reply, error = unpack(connection.recv_bytes())
        except (TimeoutError, EOFError, ConnectionError) as failure:
            said = self._stop()
            if isinstance(failure, TimeoutError):
                raise
            raise RuntimeError(f"the process of {self.work} died{said}") from failure
        finally:
            connection.close()
        if error is not None:
            raise error
        return reply

    def _connect(self) -> Connection:
        """To the server that runs, this process's or the one that it was forked from; else to a new one."""
        client = socket.socket(socket.AF_UNIX)
        try:
            client.connect(self._address or "\0")
        except OSError:
            self._start()
            client.connect(self._address)
        return Connection(client.detach())

    def _start(self) -> None:
        self._address = f"\0labkit-{uuid.uuid4()}"  # abstract: it is gone with the server
        self._owner = os.getpid()
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (open as long as the server lives)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(self._address)
            listener.listen(BACKLOG)
            code = f"from labkit import servers; servers.serve({listener.fileno()}, {self.work!r})"
            environment = {**os.environ, **self.environment}
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
            self._process = subprocess.Popen(
                [sys.executable, "-c", code], env=environment, pass_fds=[listener.fileno()],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=self._errors,
            )  # fmt: skip
        atexit.register(self._stop)

    def _stop(self) -> str:
        """End the server if it is this process's own; gives the last line that it wrote on stderr."""
        process, errors, self._address = self._process, self._errors, ""
        if process is None or errors is None or self._owner != os.getpid():
            return ""
        self._process = self._errors = None
        atexit.unregister(self._stop)
        assert process.stdin is not None
        process.stdin.close()  # the server ends when this pipe does
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(5)
        process.kill()
        process.wait()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
        errors.close()
        return f": {lines[-1]}" if lines else ""


def serve(descriptor: int, work: str) -> None:
    """In the server: answer requests until the pipe on stdin closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # interrupting a notebook reaches its whole process group
    module, _, name = work.partition(":")
    function = getattr(importlib.import_module(module), name)
    with socket.socket(fileno=descriptor) as listener:
        while True:
            ready, _, _ = select.select([listener.fileno(), 0], [], [])
            if 0 in ready:
                return
            client, _ = listener.accept()
            with Connection(client.detach()) as connection, contextlib.suppress(EOFError, ConnectionError):
                if _is_own_user(connection):
                    _answer(connection, function)


def _is_own_user(connection: Connection) -> bool:
    """Anybody on this machine can find an abstract socket, and unpickling runs code."""
    with socket.socket(fileno=os.dup(connection.fileno())) as client:
        peer = client.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return struct.unpack("3i", peer)[1] == os.getuid()


def _answer(connection: Connection, function: Callable) -> None:
    arguments = unpack(connection.recv_bytes())
    try:
        reply, error = function(*arguments), None
    except Exception as raised:
        reply, error = None, raised
    connection.send_bytes(pack((reply, error)))


def pack(value: Any) -> bytes:
    """Any picklable value as bytes; tensors keep their strides and shared storages."""
    import torch

    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def unpack(data: bytes) -> Any:
    """What `pack` packed, its tensors on the CPU."""
    import torch

    return torch.load(io.BytesIO(data), map_location="cpu", weights_only=False)
