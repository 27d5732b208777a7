"""A real vLLM server on the loopback interface, which ends with the process that started it, however that ends."""

from __future__ import annotations

import atexit
import contextlib
import http.client
import os
import re
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import TracebackType

from labkit.serve import guard
from labkit.serve.client import Client
from labkit.serve.launch import Launch
from labkit.serve.log import LogFacts, failure_reason, read_log, stage
from labkit.serve.values import is_number, is_whole

START_S = 240.0  # importing vLLM twice on a loaded machine
STOP_S = guard.GRACE_S + 2 * guard.TRACKER_S + 4
REST_S = guard.TRACKER_S + 3  # from the guards' end to the end of the log
POLL_S = 0.25
WORDS = ("tokenizer.*", "vocab.*", "tekken.json", "*.model", "*.tiktoken")  # files of which a tokenizer has one
PORTS = 5  # free ones that are tried, each of which another process may take before the server does
# Environment proxies are for the world outside, and a loopback request must not go there.
LOOPBACK = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class StartFailed(RuntimeError):
    """The server did not start; the message is one sentence on why. log: all that it wrote."""

    def __init__(self, reason: str, log: str = "") -> None:
        super().__init__(reason)
        self.log = log


class Server:
    """A vLLM server, started by `start` or `with`, and stopped by `stop`, the end of `with`, or this process's end.

    launch: what to start. port: on 127.0.0.1; None finds a free one. show: print a line of progress while it starts.
    What the server starts, writes to its temporary folder and holds on a GPU is gone when `stop` returns; if this
    process dies, even by SIGKILL, within about two seconds of that. ValueError names the argument that is wrong.
    """

    def __init__(self, launch: Launch, port: int | None = None, show: bool = True) -> None:
        if not isinstance(launch, Launch):
            raise ValueError(f"launch must be a labkit.serve.Launch, and is {launch!r}")
        if port is not None and not (is_whole(port) and port < 1 << 16):
            raise ValueError(f"port must be a whole number from 1 to 65535, or None for a free one, and is {port!r}")
        self.launch = launch
        self.port = port
        self._any_port = port is None
        self._show = show
        self._guard: subprocess.Popen[str] | None = None
        self._reader: threading.Thread | None = None
        self._lines: list[str] = []

    def start(self, timeout: float = START_S) -> Server:
        """Start the server and wait until it answers; gives itself. About 30 s on two CPU cores.

        StartFailed with the reason where it does not come up within `timeout` seconds. RuntimeError if it runs already;
        one that has died is started anew.
        """
        if not (is_number(timeout) and timeout > 0):
            raise ValueError(f"timeout must be a number of seconds above 0, and is {timeout!r}")
        if self.alive:
            raise RuntimeError(f"the server runs already, at {self.url}")
        self.stop()
        _refuse_wordless(self.launch)
        for left in reversed(range(PORTS if self._any_port else 1)):
            try:
                self._spawn()
                self._wait(timeout)
                break
            except BaseException as error:  # KeyboardInterrupt too: what was begun must not stay
                self.stop()
                taken = isinstance(error, StartFailed) and "Address already in use" in error.log
                if not (taken and left):  # somebody was faster: another free port will do
                    raise
        return self

    def stop(self) -> None:
        """End the server and all that it started; does nothing if none runs. Requests under way get an error."""
        process, self._guard = self._guard, None
        if process is None:
            return
        atexit.unregister(self.stop)
        assert process.stdin is not None
        with contextlib.suppress(OSError):
            process.stdin.close()  # the guard ends the server when this pipe does
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()  # it hangs, and its second ends the rest
            process.wait()
        self._read_rest()

    def __enter__(self) -> Server:
        return self if self.alive else self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def url(self) -> str:
        """Where it listens. RuntimeError before it was given a port."""
        if self.port is None:
            raise RuntimeError("the server has no port before it is started")
        return f"http://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._guard is not None and self._guard.poll() is None

    @property
    def log(self) -> str:
        """All that it has written so far."""
        return "".join(self._lines)

    @property
    def facts(self) -> LogFacts:
        """What its log states."""
        return read_log(self.log)

    def pids(self) -> list[int]:
        """The guard and all processes below it; empty if none runs."""
        return [self._guard.pid, *guard.descendants(self._guard.pid)] if self._guard is not None else []

    def client(self) -> Client:
        """A client of this server."""
        return Client(self.url, self.launch.served_name)

    def metrics(self) -> dict[str, float]:
        """A snapshot of /metrics: see `Client.metrics`."""
        return self.client().metrics()

    def _spawn(self) -> None:
        if self._any_port:
            self.port = free_port()
        assert self.port is not None
        self._lines = []
        command = self.launch.command(self.port)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(Path(guard.__file__)), str(os.getpid()), *command],
            env=self.launch.variables(), start_new_session=True, text=True, errors="replace",
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        )  # fmt: skip
        self._reader = threading.Thread(target=self._read, args=(self._guard, self._lines), daemon=True)
        self._reader.start()
        atexit.register(self.stop)

    @staticmethod
    def _read(process: subprocess.Popen[str], lines: list[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            lines.extend(process.stdout)

    def _read_rest(self) -> None:
        """Wait for the end of the log; not for long, since a process that was made to stay may hold it open."""
        if self._reader is not None:
            self._reader.join(REST_S)

    def _wait(self, timeout: float) -> None:
        began, shown = time.monotonic(), ""
        while True:
            seconds = time.monotonic() - began
            text = self.log
            now = stage(text)
            if now != shown:
                self._say(f"{'vLLM: ' if not shown else ' > '}{now}")
                shown = now
            if not self.alive:
                self._end_line()
                self._read_rest()
                raise StartFailed(failure_reason(self.log), self.log)
            if self._answers():
                self._say(f" > ready after {seconds:.0f} s at {self.url}\n")
                return
            if seconds > timeout:
                self._end_line()
                raise StartFailed(f"the server did not answer within {timeout:.0f} s, and was at: {now}", text)
            time.sleep(POLL_S)

    def _answers(self) -> bool:
        if not re.search("Available routes|Starting vLLM", self.log):
            return False  # another server may hold a port that this one has not taken yet
        try:
            with LOOPBACK.open(f"{self.url}/health", timeout=2) as reply:
                return reply.status == 200
        except (OSError, http.client.HTTPException):
            return False

    def _say(self, text: str) -> None:
        if self._show:
            print(text, end="", flush=True)

    def _end_line(self) -> None:
        self._say("\n")


def _refuse_wordless(launch: Launch) -> None:
    """StartFailed for a folder without a tokenizer: vLLM takes an empty one then, and every text for nothing."""
    folder = Path(launch.model)
    if launch.option("--tokenizer", "--skip-tokenizer-init") is not None or not (folder / "config.json").exists():
        return
    if not any(any(folder.glob(name)) for name in WORDS):
        raise StartFailed(
            f"there is no tokenizer in the folder {folder}: add its files, or, where only token ids are sent and read,"
            " more=('--skip-tokenizer-init',)"
        )


def free_port() -> int:
    """A port of the loopback interface that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
