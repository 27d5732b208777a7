"""Checks of a GPU kernel in a process of their own: an illegal access there does not end the student's kernel.

After an illegal memory access a process has lost CUDA for good. So on a GPU the answers that launch kernels are carried
into a child process as source, checked there, and what comes back are the rows of the result.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from labkit import cells, source

IN_CHILD = "LABKIT_CHECK_IN_CHILD"
TIMEOUT = 300.0  # seconds, compilation of every kernel variant included


def in_child() -> bool:
    """Whether this process is such a child."""
    return IN_CHILD in os.environ


def rows(question: str, answer: Any, timeout: float = TIMEOUT) -> list[dict[str, Any]]:
    """Run the public checks of `question` on `answer` in a child process, and give the fields of its rows.

    Raises RuntimeError with one sentence when the child died or took longer than `timeout` seconds, and
    source.NotStandalone when the answer cannot be carried over.
    """
    with tempfile.TemporaryDirectory() as folder:
        answer_file, result_file = Path(folder) / "answer.py", Path(folder) / "rows.json"
        answer_file.write_text(source.standalone(answer), encoding="utf-8")
        command = [sys.executable, "-m", "labkit.checks.isolate", question, answer.__name__, answer_file, result_file]
        environment = os.environ | {IN_CHILD: "1"}
        try:
            done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=timeout)
        except subprocess.TimeoutExpired:
            raise RuntimeError(
                f"the checks of {question} took longer than {timeout:.0f} s: does a loop never end?"
            ) from None
        if not result_file.exists():
            last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise RuntimeError(f"your kernel ended its process (exit code {done.returncode}): {last[:300]}")
        return json.loads(result_file.read_text(encoding="utf-8"))


def main(question: str, name: str, answer_file: str, result_file: str) -> None:
    """The child: run the answer's source as if it were a notebook cell, check it, write the rows."""
    from labkit.checks import check

    namespace: dict[str, Any] = {"__name__": "__main__"}
    cells.run_cell(Path(answer_file).read_text(encoding="utf-8"), namespace, question)
    result = check(question, namespace[name])
    Path(result_file).write_text(json.dumps([dataclasses.asdict(row) for row in result.rows]), encoding="utf-8")


if __name__ == "__main__":
    main(*sys.argv[1:])
