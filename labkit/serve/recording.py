"""What a notebook measures on a live server, or a recording of it where none may be started.

Grading has no server: it would cost half a minute a student, and what it measured would say nothing about an answer.
So a notebook asks a `Session` for each measurement by name, and gets it live or as it was recorded.
"""

from __future__ import annotations

import http.client
import importlib
import importlib.util
import json
import os
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from labkit.serve.launch import Launch
from labkit.workload import Request

if TYPE_CHECKING:
    from labkit.serve.client import Client
    from labkit.serve.server import Server

FOLDER = Path(__file__).parent / "recorded"
DIGITS = 4  # of a second, in a recording
ENDING_S = 10.0  # from an engine's death to the end of its server


@dataclass(frozen=True)
class Timeline:
    """When a request arrived, was sent and got each token, in seconds from the start of the run; lengths in tokens.

    token_times: empty for a request that got no answer. queue, prefill, decode: durations as the engine measured them,
    None where it does not say. cached: tokens of the prompt found in the prefix cache.
    """

    id: int
    arrival: float
    sent: float
    token_times: tuple[float, ...]
    prompt_len: int = 0
    cached: int | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None


def why_not_live() -> str:
    """Why no server is started here, or "" if one can be."""
    if os.environ.get("NBGRADER_EXECUTION"):
        return "this is grading, where nothing is started"
    if not importlib.util.find_spec("vllm"):
        return "vLLM is not installed"
    return ""


class Session:
    """Measurements on one server, each known by a name.

    launch: the server. recording: name of a recording of the same measurements, made with another session's `save`.
    `live` says which of the two answers. The server runs from here to `close`, to the next session of that recording (a
    cell that is run again starts no second server), or to the end of the process.
    """

    _running: ClassVar[dict[str, Session]] = {}

    def __init__(self, launch: Launch, recording: str, show: bool = True) -> None:
        if before := self._running.pop(recording, None):
            before.close()
        self._recording = recording
        self._kept: dict[str, Any] = {}
        self._server: Server | None = None
        reason = why_not_live()
        if not reason:
            server = importlib.import_module("labkit.serve.server")
            try:
                self._server = server.Server(launch, show=show).start()
                self._running[recording] = self
            except server.StartFailed as failure:
                reason = f"the server did not start: {failure}"
                warnings.warn(reason, stacklevel=2)
        if reason:
            self._kept = read_recording(recording)
            if show:
                print(f"No server here ({reason}). Measurements are those that were recorded.")

    @property
    def live(self) -> bool:
        """Whether measurements come from a server that runs now."""
        return self._server is not None

    @property
    def log(self) -> str:
        """What the server has written."""
        return self._server.log if self._server is not None else self._kept["log"]

    def ask(self, name: str, what: Callable[[Client], Any]) -> Any:
        """What `what(client)` gives, a value of JSON.

        KeyError where it is neither live nor recorded. RuntimeError with the reason if the server has ended.
        """
        if self._server is not None:
            try:
                self._kept[name] = what(self._server.client())
            except Exception as error:
                self._refuse_if_ended(error)
                raise
        if name not in self._kept:
            raise KeyError(f"nothing is recorded as {name!r}, and no server runs: measure it where vLLM is installed")
        return self._kept[name]

    def load(
        self, name: str, requests: Sequence[Request], prompts: Sequence[Sequence[int]] | None = None, **options: Any
    ) -> list[Timeline]:
        """The timelines of an open-loop load (`labkit.serve.run_load`). Errors as of `ask`."""
        found = [_timeline(t) for t in self.ask(name, lambda client: _loaded(client, requests, prompts, options))]
        if not all(t.token_times for t in found):
            self._refuse_if_ended(None)
        return found

    def metrics(self, name: str) -> str:
        """The text of /metrics, vLLM's own lines of it."""
        return self.ask(name, lambda client: _vllm_lines(client.get("/metrics")))

    def save(self, path: Path | str) -> None:
        """Write what was measured so far and the facts of the log, for `recording`."""
        log = _without_paths(self.log)
        facts = asdict(importlib.import_module("labkit.serve.log").read_log(log))
        kept = {**self._kept, "log": log, "facts": facts}
        Path(path).write_text(json.dumps(kept, ensure_ascii=False, separators=(",", ":")), encoding="utf-8")

    def _refuse_if_ended(self, sign: Exception | None) -> None:
        """RuntimeError if the server has ended, or ends within a moment: `sign` may be the first of that.

        It may be where it came of a request (labkit.serve.RequestRefused is a RuntimeError); no moment is waited else.
        """
        if self._server is None:
            return
        of_request = sign is None or isinstance(sign, OSError | http.client.HTTPException | RuntimeError)
        until = time.monotonic() + (ENDING_S if of_request else 0)
        while self._server.alive and time.monotonic() < until:
            time.sleep(0.1)
        if not self._server.alive:
            said = importlib.import_module("labkit.serve.log").failure_reason(self._server.log)
            raise RuntimeError(f"the server has ended ({said}): run the cell that starts it again") from sign

    def close(self) -> None:
        """Stop the server, if one runs. What was measured stays; LABKIT_RECORD names a folder for it."""
        if self._server is not None:
            if folder := os.environ.get("LABKIT_RECORD"):
                self.save(Path(folder) / f"{self._recording}.json")
            self._kept["log"] = self._server.log
            self._server.stop()
            self._server = None
            if self._running.get(self._recording) is self:
                del self._running[self._recording]


def read_recording(name: str) -> dict[str, Any]:
    """The measurements of a recording by their names. ValueError names the recordings that there are."""
    path = FOLDER / f"{name}.json"
    if not path.exists():
        known = ", ".join(sorted(p.stem for p in FOLDER.glob("*.json")))
        raise ValueError(f"recording must be one of {known}, and is {name!r}")
    return json.loads(path.read_text(encoding="utf-8"))


def _loaded(
    client: Client, requests: Sequence[Request], prompts: Sequence[Sequence[int]] | None, options: dict[str, Any]
) -> list[dict[str, Any]]:
    load = importlib.import_module("labkit.serve.load")
    run = load.run_load(client, requests, prompts, **options)
    return [
        {
            "id": r.id, "arrival": _short(r.arrival), "sent": _short(r.sent),
            "token_times": [_short(t) for t in r.token_times] if r.ok else [], "prompt_len": r.prompt_len,
            "cached": r.cached, "queue": _short(r.queue), "prefill": _short(r.prefill), "decode": _short(r.decode),
        }
        for r in run.records
    ]  # fmt: skip


def _timeline(found: dict[str, Any]) -> Timeline:
    return Timeline(**{**found, "token_times": tuple(found["token_times"])})


def _short(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, DIGITS)


def _vllm_lines(text: str) -> str:
    """Without buckets and times of creation, and without the metrics of Python itself."""
    kept = [
        line for line in text.splitlines() if "vllm:" in line and "_bucket{" not in line and "_created{" not in line
    ]
    return "\n".join(line for line in kept if not line.startswith("# HELP")) + "\n"


def _without_paths(text: str) -> str:
    """A log that says nothing of the machine it was written on, nor lists routes: Python's own warnings name files."""
    lines = [line for line in text.splitlines() if "Route: /" not in line and not line.startswith(("/", "  "))]
    return "\n".join(lines).replace(str(Path.home()), "/home/student") + "\n"
