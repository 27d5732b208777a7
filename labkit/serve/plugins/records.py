"""A stat logger of vLLM that keeps one row for each finished request and one for each step, as lines of JSON.

Loaded by name through `vllm.stat_logger_plugins` under `vllm serve`; in a notebook pass the class in
`LLMEngine.from_engine_args(..., stat_loggers=[RecordLogger])`. It writes where LABKIT_RECORDS says, or nowhere.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

from vllm.v1.metrics.loggers import StatLoggerBase

from labkit.serve import plugins

REQUESTS, STEPS = "requests.jsonl", "steps.jsonl"


class RecordLogger(StatLoggerBase):
    """Rows go to <LABKIT_RECORDS>/requests.jsonl and steps.jsonl, each written when it is known."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        folder = os.environ.get(plugins.RECORDS)
        self.folder = Path(folder) if folder else None
        self.engine_index = engine_index
        if self.folder:
            self.folder.mkdir(parents=True, exist_ok=True)

    def record(
        self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
    ) -> None:
        """Called by vLLM after each step that gave something."""
        if self.folder is None:
            return
        if scheduler_stats is not None and iteration_stats is not None:
            self._append(STEPS, step_row(scheduler_stats, iteration_stats))
        for request in iteration_stats.finished_requests if iteration_stats is not None else ():
            self._append(REQUESTS, request_row(request, iteration_stats.iteration_timestamp))

    def log_engine_initialized(self) -> None:
        """Nothing is said: the rows speak."""

    def _append(self, name: str, row: dict[str, Any]) -> None:
        assert self.folder is not None
        with (self.folder / name).open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def request_row(request: Any, finished: float) -> dict[str, Any]:
    """One finished request. Times in seconds: in the queue, in its prefill, in decoding, and from end to end.

    finished: seconds since the epoch. ttft, as the engine sees it, is queued + prefill.
    """
    return {
        "id": request.request_id,
        "finished": finished,
        "prompt_tokens": request.num_prompt_tokens,
        "cached_tokens": request.num_cached_tokens,
        "output_tokens": request.num_generation_tokens,
        "queued": request.queued_time,
        "prefill": request.prefill_time,
        "decode": request.decode_time,
        "e2e": request.e2e_latency,
        "finish_reason": str(request.finish_reason),
    }


def step_row(scheduler: Any, iteration: Any) -> dict[str, Any]:
    """One step: requests that ran and that wait, tokens generated and read as prompts, share of KV blocks in use."""
    return {
        "time": iteration.iteration_timestamp,
        "running": scheduler.num_running_reqs,
        "waiting": scheduler.num_waiting_reqs,
        "generated": iteration.num_generation_tokens,
        "prompt_tokens": iteration.num_prompt_tokens,
        "preempted": iteration.num_preempted_reqs,
        "kv_usage": scheduler.kv_cache_usage,
    }


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one file, REQUESTS or STEPS; none if it is not there."""
    path = Path(folder) / name
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def decode_batches(steps: list[dict[str, Any]]) -> Counter[int]:
    """Requests that decoded together -> steps, of the steps without a prefill: what `graphs.fit` takes."""
    return Counter(row["generated"] for row in steps if row["generated"] and not row["prompt_tokens"])
