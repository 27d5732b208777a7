"""Runs one process per submission, a few at a time, each with a wall clock; one that died is tried once more."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from grading.sandbox import cuda_devices
from grading.worker import Graded, Job, read_result, work

ATTEMPTS = 2


def gpus() -> list[str]:
    """Indices of this machine's GPUs, as CUDA_VISIBLE_DEVICES wants them."""
    return sorted(d.removeprefix("/dev/nvidia") for d in cuda_devices() if d.removeprefix("/dev/nvidia").isdigit())


def default_workers() -> int:
    """One submission per GPU, since its memory is not shared; else one per core."""
    return len(gpus()) or os.cpu_count() or 1


def run_all(
    jobs: list[Job], workers: int, seconds: float, target: Callable[[Job], None] = work
) -> Iterator[tuple[Job, Graded]]:
    """Grade all jobs and yield each with its result as it ends. seconds: wall clock after which a process is killed."""
    if workers < 1:
        raise ValueError(f"workers is {workers}, at least 1 expected")
    context = process_context()
    waiting = [(job, 1) for job in jobs]
    free = list(range(workers))
    running: dict[int, tuple[BaseProcess, Job, int, int, float]] = {}
    try:
        while waiting or running:
            while waiting and free:
                job, attempt = waiting.pop(0)
                slot = free.pop(0)
                process = context.Process(target=target, args=(_fresh(job, attempt, slot),), daemon=False)
                process.start()
                running[process.sentinel] = (process, job, attempt, slot, time.monotonic() + seconds)
            wait(list(running), timeout=0.5)
            for sentinel in [
                s for s, (p, *_, until) in running.items() if not p.is_alive() or time.monotonic() > until
            ]:
                process, job, attempt, slot, _ = running.pop(sentinel)
                killed = process.is_alive()
                _end(process)
                free.append(slot)
                ended = _fresh_path(job, attempt)
                result = read_result(replace(job, folder=ended))
                if result is None and not killed and attempt < ATTEMPTS:
                    waiting.append((job, attempt + 1))
                    continue
                reason = (
                    f"no end after {seconds:.0f} s"
                    if killed
                    else f"the grader's process died twice ({process.exitcode})"
                )
                yield replace(job, folder=ended), result or Graded(error=reason)
    finally:
        for process, *_ in running.values():
            _end(process)


def _fresh_path(job: Job, attempt: int) -> Path:
    return job.folder / f"attempt{attempt}"


def _fresh(job: Job, attempt: int, slot: int) -> Job:
    folder = _fresh_path(job, attempt)
    folder.mkdir(parents=True)
    gpu = gpus()
    settings = job.settings | ({"gpu": gpu[slot % len(gpu)]} if gpu else {})
    return replace(job, folder=folder, settings=settings)


def process_context() -> Any:
    """A fork server that has imported nbgrader and labkit once; where there is none (Windows), fresh processes."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["grading.worker"])
    return context


def _end(process: BaseProcess) -> None:
    """Kill a process with its group: its sandboxes die with it."""
    if process.is_alive() and process.pid:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if os.getpgid(process.pid) == process.pid:
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
    process.join()
