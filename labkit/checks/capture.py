"""Keeps stderr out of a graded cell: nbgrader gives no point to a cell that writes there, be it right or wrong."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from typing import Any

KEPT = 65_536  # bytes of what was caught, from its end


@contextlib.contextmanager
def stderr() -> Iterator[Callable[[], str]]:
    """Catch all that is written to sys.stderr and to file descriptor 2 (C libraries and child processes too).

    A log handler made before keeps a stream of its own, in a notebook one that is not descriptor 2: those that write to
    stderr are turned to the same place. Yields a function that gives the last 64 KiB of what was caught, also after the
    block has ended.
    """
    with tempfile.TemporaryFile(buffering=0) as file:
        sink = io.TextIOWrapper(file, encoding="utf-8", errors="replace", write_through=True)
        saved_fd, saved_stream, text = os.dup(2), sys.stderr, ""
        handlers = _log_handlers(saved_stream)
        try:
            os.dup2(file.fileno(), 2)
            sys.stderr = sink
            for handler in handlers:
                handler.stream = sink
            yield lambda: text
        finally:
            for handler in handlers:
                handler.stream = saved_stream
            sys.stderr = saved_stream
            os.dup2(saved_fd, 2)
            os.close(saved_fd)
            file.seek(max(0, file.seek(0, os.SEEK_END) - KEPT))
            text = file.read().decode("utf-8", errors="replace")
            sink.detach()


def _log_handlers(stream: Any) -> list[logging.StreamHandler]:
    """Handlers that hold `stream`. One that asks for sys.stderr anew at each record has none of its own."""
    loggers = [logging.root, *logging.root.manager.loggerDict.values()]
    handlers = {h for logger in loggers for h in getattr(logger, "handlers", [])}
    return [h for h in handlers if vars(h).get("stream") is stream]
