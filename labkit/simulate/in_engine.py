"""A scheduler of a student's in the place of the real engine's, on a small model of the Qwen3 family."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass(frozen=True)
class EngineRun:
    """steps, preemptions: counted. same_tokens: as with every prompt served alone. free, num_blocks: of the pool."""

    steps: int
    preemptions: int
    same_tokens: bool
    free: int
    num_blocks: int

    def __str__(self) -> str:
        same = "the same tokens as each prompt alone" if self.same_tokens else "OTHER tokens than each prompt alone"
        return (
            f"{self.steps} steps, {self.preemptions} preemptions, {same}, {self.free} of {self.num_blocks} blocks free"
            " at the end"
        )


def run_in_engine(schedule: Callable[..., list[Any]], num_blocks: int = 12) -> EngineRun:
    """Serve five prompts with `schedule` (as `drive` takes one) choosing the chunks of labkit.engine's steps.

    The pool of num_blocks blocks of 4 tokens is too small for the four that may run at a time. Whatever `schedule` or
    the engine raises comes through.
    """
    from labkit import engine  # a big import, which a grader may hide
    from labkit.engine.scheduler import Chunk

    config = engine.ModelConfig("qwen3", 97, 32, 48, 2, 4, 2, 16, 256, qk_norm=True)
    weights = engine.random_weights(config, torch.float32, "cpu")
    weights = replace(weights, embedding=weights.embedding * 20, head=weights.head * 20)  # clear winners among logits
    params = engine.SamplingParams(max_tokens=14)
    prompts = [[i + 1] * (5 + 3 * i) for i in range(5)]

    def make(blocks: int) -> engine.Engine:
        options = engine.EngineConfig(
            num_blocks=blocks, block_size=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16,
            prefix_caching=False,
        )  # fmt: skip
        return engine.Engine(config, weights, options)

    yours = make(num_blocks)
    queues = yours.scheduler

    def chosen() -> list[Chunk]:
        chunks = schedule(queues.running, queues.waiting, yours.blocks, 16, 4)
        for requests, status in ((queues.running, engine.Status.RUNNING), (queues.waiting, engine.Status.WAITING)):
            for request in requests:
                request.status = status
        return [Chunk(*chunk) for chunk in chunks]

    queues.schedule = chosen  # type: ignore[method-assign]
    requests = [yours.add(prompt, params) for prompt in prompts]
    while yours.busy:
        yours.step()
    alone = [make(64).generate([prompt], params)[0] for prompt in prompts]
    return EngineRun(
        yours.counters.steps, sum(r.preemptions for r in requests), [r.output for r in requests] == alone,
        yours.blocks.pool.num_free, num_blocks,
    )  # fmt: skip
