"""One student's kernel, driven from the trusted process with nbclient: it may die, hang or flood, and says so."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from subprocess import DEVNULL
from typing import Any

import nbformat
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionComplete, CellTimeoutError, DeadKernelError
from nbclient.util import run_sync
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from grading.sandbox import Box

CELL_BYTES = 200_000  # what one cell may show
REPLY_BYTES = 64_000_000  # what one call of a hidden check may send back
CELL_OUTPUTS = 200
TIMEOUT = "CellTimeoutError"
TIMED_OUT = {"ename": "CampTimeout", "evalue": "", "traceback": []}  # a reply of nbclient's own, never the kernel's
CROWDED = "the kernel died, since it filled the folder of its sockets, which is on the grader's disk"
CUT = "\n... output cut here ...\n"


class KernelLost(Exception):
    """The kernel died, or does not react to an interrupt."""


def failure(name: str, message: str) -> NotebookNode:
    """An error output, which gives a cell no points and says why."""
    return new_output("error", ename=name, evalue=message, traceback=[f"{name}: {message}"])


def _as_seen(text: str) -> str:
    """Progress bars as a terminal shows them: what a carriage return overwrote is gone."""
    return "\n".join(line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n"))


class _Client(NotebookClient):
    """Drops what a cell shows beyond its allowance as it arrives, so that a flood never fills the grader's memory.

    Joins a stream's pieces too: nbclient's own joining takes time that grows with the square of a line's length.
    """

    room = CELL_BYTES
    count = CELL_OUTPUTS
    crowded: Callable[[], bool] = staticmethod(lambda: False)  # asked each second, with whether the kernel lives

    async def _async_check_alive(self) -> None:
        if self.crowded():
            raise DeadKernelError("too many files")
        await super()._async_check_alive()

    def process_message(self, msg: dict, cell: NotebookNode, cell_index: int) -> NotebookNode | None:
        """A message may hold anything, since a student's code can send its own: what cannot be read costs its cell."""
        try:
            if msg["msg_type"] in ("display_data", "update_display_data"):
                size = sum(len(str(value)) for value in msg["content"].get("data", {}).values())
                if size > self.room or self.count <= 0:
                    return None
                self.room, self.count = self.room - size, self.count - 1
            return super().process_message(msg, cell, cell_index)
        except CellExecutionComplete:
            raise
        except Exception as error:
            cell.outputs.append(failure("BadMessage", f"the kernel sent what nobody can show ({type(error).__name__})"))
            return None

    def output(self, outs: list, msg: dict, display_id: str | None, cell_index: int) -> NotebookNode | None:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            if self.room <= 0:
                return None
            if len(content["text"]) > self.room:
                content["text"] = content["text"][: self.room] + CUT
            self.room -= len(content["text"])
            if outs and outs[-1].output_type == "stream" and outs[-1].name == content["name"]:
                outs[-1].text += content["text"]
                return None
        elif msg["msg_type"] == "execute_result":
            content["data"] = {"text/plain": str(content.get("data", {}).get("text/plain", ""))[:CELL_BYTES]}
        elif msg["msg_type"] == "error":
            content["evalue"] = content["evalue"][:10_000]
            content["traceback"] = [line[:10_000] for line in content["traceback"][-100:]]
        return super().output(outs, msg, display_id, cell_index)


def _fills(folder: Path, limit: int) -> bool:
    """Whether what lies in the folder takes more than `limit` bytes of disk, or is more than a thousand files."""
    taken = count = 0
    for place, folders, files in os.walk(folder):
        for name in (*folders, *files):
            with contextlib.suppress(OSError):
                taken, count = taken + 512 * os.lstat(os.path.join(place, name)).st_blocks, count + 1
            if taken > limit or count > 1000:
                return True
    return False


def _valid(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """The outputs, each that no notebook can hold replaced by an error that says so."""
    return [o if _is_valid(o) else failure("BadMessage", "an output here was not valid") for o in outputs]


def _is_valid(output: NotebookNode) -> bool:
    try:
        cell = nbformat.v4.new_code_cell("", outputs=[output])
        nbformat.validate(nbformat.v4.new_notebook(cells=[cell]))
        json.dumps(output)
    except Exception:  # whatever it holds
        return False
    return True


class Session:
    """A running kernel. Every method raises KernelLost when it is gone, after which only `stop` may be called."""

    def __init__(self, make_box: Callable[[Path], Box]):
        self._runtime = Path(tempfile.mkdtemp(prefix="camp-"))
        box = make_box(self._runtime)
        spec = self._runtime / "kernels" / "camp"
        spec.mkdir(parents=True)
        spec_json = {"argv": box.command(), "display_name": "camp", "language": "python", "interrupt_mode": "message"}
        (spec / "kernel.json").write_text(json.dumps(spec_json))
        specs = KernelSpecManager(kernel_dirs=[str(spec.parent)], ensure_native_kernel=False)
        # No network inside, so sockets are files; absolute, because the default is relative to the working folder.
        self._manager = AsyncKernelManager(
            kernel_name="camp", kernel_spec_manager=specs, transport="ipc", ip=str(self._runtime / "k"),
            connection_file=str(self._runtime / "connection.json"),
        )  # fmt: skip
        self._client = _Client(
            NotebookNode(nbformat.v4.new_notebook()), km=self._manager, allow_errors=True, interrupt_on_timeout=True,
            raise_on_iopub_timeout=True, error_on_timeout=TIMED_OUT, record_timing=False,
            store_widget_state=False, startup_timeout=120, on_cell_executed=self._note_timeout,
        )  # fmt: skip
        self._client.log.setLevel("CRITICAL")
        if box.isolated:  # else it is the kernel's home, with its caches
            self._client.crowded = lambda: _fills(self._runtime, box.limits.runtime_mb << 20)
        try:
            where = str(self._runtime if box.isolated else box.data)
            self._client.start_new_kernel(env=box.environment(), cwd=where, stdout=DEVNULL, stderr=DEVNULL)
            self._client.start_new_kernel_client()
        except RuntimeError as error:
            self.stop()
            raise KernelLost(f"the kernel did not start: {error}") from None

    def run(self, cell: NotebookNode, timeout: float, room: int = CELL_BYTES, history: bool = True) -> None:
        """Run a code cell; its outputs are in the cell, also those from before a KernelLost.

        history: whether the notebook's `In` and `Out` get it.
        """
        self._client.room, self._client.count = room, CELL_OUTPUTS
        self._client.timeout = max(1, int(timeout + 0.5))
        self._client.nb.cells = [cell]
        self._timed_out = False
        self._client.reset_execution_trackers()
        try:
            self._client.execute_cell(cell, 0, store_history=history)
        except DeadKernelError:
            raise KernelLost(CROWDED if self._client.crowded() else "the kernel died") from None
        except (CellTimeoutError, RuntimeError):
            raise KernelLost(f"no end after {self._client.timeout} s, nor after an interrupt") from None
        except Exception as error:  # a reply that a student's code sent in the kernel's name
            raise KernelLost(f"the kernel died for its grader: {type(error).__name__} in its reply") from None
        finally:
            cell.outputs = _valid(cell.outputs)
        if self._client.crowded():
            raise KernelLost(CROWDED)
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = _as_seen(output.text)
        if self._timed_out:  # the interrupt's own traceback says nothing to anybody
            cell.outputs = [o for o in cell.outputs if o.output_type not in ("error", "execute_result")]
            cell.outputs.append(failure(TIMEOUT, f"no end after {self._client.timeout} s"))

    def _note_timeout(self, cell: NotebookNode, cell_index: int, execute_reply: dict) -> None:
        self._timed_out = execute_reply["content"].get("ename") == TIMED_OUT["ename"]

    def execute(self, source: str, timeout: float) -> tuple[str, str]:
        """Run source of the grader's own, unrecorded: (what it printed, its error line or "")."""
        cell = new_code_cell(source)
        self.run(cell, timeout, REPLY_BYTES, history=False)
        text = "".join(o.text for o in cell.outputs if o.output_type == "stream" and o.name == "stdout")
        errors = [f"{o.ename}: {o.evalue}" for o in cell.outputs if o.output_type == "error"]
        return text, errors[0] if errors else ""

    def stop(self) -> None:
        """Kill the kernel and everything it started; never fails."""
        client: Any = self._client.kc
        if client is not None:
            client.stop_channels()
        try:
            if self._manager.has_kernel:
                run_sync(self._manager.shutdown_kernel)(now=True)
            run_sync(self._manager.cleanup_resources)()
        except (RuntimeError, OSError):
            pass
        shutil.rmtree(self._runtime, ignore_errors=True)
