"""Hidden checks: they run in the grader's trusted process, and the student's process only maps inputs to outputs.

Arguments travel as .npz in base64, results come back the same way behind a nonce made for that call, and nothing is
unpickled. Comparing happens here, so an answer with an `__eq__` that is always true, or one that switches asserts off,
gains nothing.
"""

from __future__ import annotations

import base64
import importlib
import inspect
import io
import json
import re
import secrets
import textwrap
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from grading.enclosed import enclosed
from labkit.checks import Failed, require

__all__ = ["Failed", "Remote", "Verdict", "find_mark", "hidden_check", "require", "run_hidden"]

RESULT_BYTES = 64_000_000  # unpacked; what comes over the wire is bounded by the session
MARK = re.compile(r"^\s*# blackbox: (\w+):(\w+)\s*$", re.MULTILINE)

# Runs in the student's process, enclosed. The driver sees a copy of the notebook's names, without those that hide a
# built-in one, so that it overwrites nothing and a scratch variable called `list` does not end it.
SNIPPET = """
import __future__, base64, builtins, io, json, sys
import numpy

if "torch" in sys.modules:
    from labkit.checks.neutral import neutral
else:
    from contextlib import nullcontext as neutral

def unpack(payload):
    arrays = numpy.load(io.BytesIO(base64.b64decode(payload)), allow_pickle=False)
    kinds = json.loads(str(arrays["kinds"]))
    return [arrays[f"a{i}"] if k == "nd" else json.loads(str(arrays[f"a{i}"])) for i, k in enumerate(kinds)]

def plain(value):
    value = value.detach().cpu() if hasattr(value, "detach") else value
    return value.tolist() if hasattr(value, "tolist") else list(value)

def pack(result):
    values = [v.detach().cpu().numpy() if hasattr(v, "detach") else v for v in
              (result if isinstance(result, tuple) else [result])]
    kinds = ["nd" if isinstance(v, numpy.ndarray) else "js" for v in values]
    arrays = {f"a{i}": v if k == "nd" else numpy.array(json.dumps(v, default=plain))
              for i, (k, v) in enumerate(zip(kinds, values))}
    buffer = io.BytesIO()
    numpy.savez(buffer, kinds=numpy.array(json.dumps(kinds)), **arrays)
    return base64.b64encode(buffer.getvalue()).decode()

names = {n: v for n, v in notebook.items() if n not in vars(builtins)}
names.update(__name__="__main__", __builtins__=builtins)
if "labkit" in sys.modules:
    names["labkit"] = sys.modules["labkit"]
exec(compile(DRIVER, "<driver>", "exec", __future__.annotations.compiler_flag, True), names)
with neutral():
    line = NONCE + pack(eval(FUNCTION, names)(*unpack(PAYLOAD)))
print("\\n" + line)
"""


class StudentError(Failed):
    """The student's code raised, or gave nothing that could be read."""


class Remote:
    """Calls functions in the student's process.

    execute(source) runs source there and gives (stdout, error line or ""). `wall` is the time of the last call in
    seconds on the grader's clock, an upper bound for what the call took.
    """

    def __init__(self, execute: Callable[[str], tuple[str, str]]):
        self._execute = execute
        self.wall = 0.0

    def call(self, function: str | Callable, *arguments: Any) -> Any:
        """Call a function of the notebook by name, or send a driver: a function whose source runs there.

        Arguments and results are numpy arrays or JSON values; a tuple result comes back as a tuple. Within lists and
        dictionaries arrays, tensors, numpy's numbers and iterators come back as plain numbers and lists. A driver may
        use the notebook's names, and changes none. Raises StudentError when the call fails.
        """
        name, driver = (function, "") if isinstance(function, str) else (function.__name__, _source(function))
        nonce = secrets.token_hex(16)
        given = {"DRIVER": driver, "FUNCTION": name, "PAYLOAD": _pack(arguments), "NONCE": nonce}
        source = enclosed("".join(f"{key} = {value!r}\n" for key, value in given.items()) + SNIPPET)
        start = time.perf_counter()
        text, error = self._execute(source)
        self.wall = time.perf_counter() - start
        if error:
            raise StudentError(f"{name} raised {error}")
        line = next((line for line in reversed(text.splitlines()) if line.startswith(nonce)), None)
        if line is None:
            raise StudentError(f"{name}: no result came back")
        try:
            values = _unpack(line[len(nonce) :])
        except Exception as broken:
            raise StudentError(f"{name}: the result could not be read ({type(broken).__name__}: {broken})") from None
        return values[0] if len(values) == 1 else tuple(values)


def _source(function: Callable) -> str:
    return textwrap.dedent(inspect.getsource(function))


def _pack(values: tuple) -> str:
    arrays: dict[str, Any] = {
        f"a{i}": v if isinstance(v, np.ndarray) else np.array(json.dumps(v)) for i, v in enumerate(values)
    }
    kinds = np.array(json.dumps(["nd" if isinstance(v, np.ndarray) else "js" for v in values]))
    buffer = io.BytesIO()
    np.savez(buffer, kinds=kinds, **arrays)
    return base64.b64encode(buffer.getvalue()).decode()


def _unpack(text: str) -> list:
    """ValueError for a reply that would grow beyond RESULT_BYTES: a few kilobytes of it may be gigabytes of zeros."""
    with zipfile.ZipFile(io.BytesIO(base64.b64decode(text))) as archive:
        size = sum(member.file_size for member in archive.infolist())
    if size > RESULT_BYTES:
        raise ValueError(f"the result has {size} bytes, {RESULT_BYTES} are allowed")
    arrays = np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)
    kinds = json.loads(str(arrays["kinds"]))
    return [arrays[f"a{i}"] if k == "nd" else json.loads(str(arrays[f"a{i}"])) for i, k in enumerate(kinds)]


@dataclass(frozen=True)
class Verdict:
    """Fraction of a hidden cell's points, 0 to 1, and why it is not 1. The message is for the instructor alone."""

    fraction: float
    message: str = ""


CHECKS: dict[tuple[str, str], list[Callable[[Remote], None]]] = {}


def hidden_check(lab: str, question: str) -> Callable:
    """Decorator: one hidden check of a question. Its checks weigh the same; each raises Failed or passes."""

    def add(function: Callable[[Remote], None]) -> Callable[[Remote], None]:
        CHECKS.setdefault((lab, question), []).append(function)
        return function

    return add


def find_mark(source: str) -> tuple[str, str] | None:
    """(lab, question) of the `# blackbox:` line in a cell, or None."""
    found = MARK.search(source)
    return (found[1], found[2]) if found else None


def run_hidden(lab: str, question: str, remote: Remote) -> Verdict:
    """Run a question's hidden checks. Trouble in one costs that one; KeyError if the question has none."""
    importlib.import_module(f"grading.hidden.{lab}")
    checks = CHECKS[(lab, question)]
    messages = []
    for check in checks:
        try:
            check(remote)
        except Exception as error:  # whatever the student's values did to the comparison counts against them alone
            messages.append(str(error) if isinstance(error, Failed) else f"{type(error).__name__}: {error}")
    return Verdict(1 - len(messages) / len(checks), "; ".join(messages))
