"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from collections.abc import Sequence as Sized
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from labkit.engine.block_manager import BlockManager
from labkit.engine.config import EngineConfig, ModelConfig
from labkit.engine.counters import Counters
from labkit.engine.policy import FCFS, Policy
from labkit.engine.requests import Emitted, EngineError, Request, SamplingParams, Status, check_prompt
from labkit.engine.runner import Flight, ModelRunner
from labkit.engine.scheduler import Chunk, Scheduler
from labkit.engine.weights import Weights, load_weights


class Engine:
    """Continuous batching over one model.

    config, weights: of the model, the weights on the device to run on. options: how to run. policy: who is served
    first, FCFS unless given. ValueError for sizes that do not go together.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, options: EngineConfig | None = None, policy: Policy | None = None
    ):
        self.config, self.options = config, options or EngineConfig()
        if weights.norm.device.type != torch.device(self.options.device).type:
            raise ValueError(f"weights are on {weights.norm.device}, but device is {self.options.device!r}")
        self.counters = Counters()
        self.max_model_len = self.options.max_model_len or config.max_position
        if self.max_model_len > config.max_position:
            raise ValueError(
                f"max_model_len ({self.max_model_len}) is beyond the model's {config.max_position} positions"
            )
        num_blocks = self.options.num_blocks or self._blocks_that_fit(weights)
        self.blocks = BlockManager(num_blocks, self.options.block_size, self.options.prefix_caching, self.counters)
        self.scheduler = Scheduler(
            self.blocks, policy or FCFS(), self.counters, max_num_seqs=self.options.max_num_seqs,
            max_num_batched_tokens=self.options.max_num_batched_tokens, watermark=self.options.watermark,
        )  # fmt: skip
        self.runner = ModelRunner(
            config, weights, self.options, max_model_len=self.max_model_len, num_blocks=num_blocks,
            counters=self.counters,
        )  # fmt: skip
        overlap = self.options.overlap
        self._overlap = self.runner.device.type == "cuda" if overlap is None else overlap
        self._flights: deque[Flight] = deque()  # launched, their tokens not yet taken
        self._next_id = 0

    @classmethod
    def load(cls, folder: Path | str, policy: Policy | None = None, **options: Any) -> Engine:
        """An engine for a checkpoint folder (config.json and safetensors). options: fields of EngineConfig."""
        engine_config = EngineConfig(**options)
        config = ModelConfig.from_folder(folder)
        dtype = engine_config.dtype or (torch.float32 if engine_config.device == "cpu" else config.dtype)
        triton = engine_config.kernels == "triton" or (engine_config.kernels is None and engine_config.device != "cpu")
        weights = load_weights(folder, config, dtype, engine_config.device, int4=triton and dtype != torch.float32)
        return cls(config, weights, engine_config, policy)

    @property
    def busy(self) -> bool:
        """Whether some request waits or runs."""
        return bool(self.scheduler.waiting or self.scheduler.running)

    def add(self, prompt: Sized[int], params: SamplingParams | None = None, *, priority: int = 0) -> Request:
        """Let a request wait for the next step. ValueError for a prompt that can never be served, naming the reason."""
        params = params or SamplingParams()
        tokens = check_prompt(prompt, self.config.vocab_size, self.max_model_len)
        # The last token is never computed, so it takes no slot.
        needed = self.blocks.blocks_for(min(len(tokens) + params.max_tokens, self.max_model_len) - 1)
        if needed > self.blocks.pool.num_blocks:
            raise ValueError(
                f"prompt of {len(tokens)} tokens and max_tokens {params.max_tokens} need {needed} KV blocks of"
                f" {self.options.block_size} tokens; the pool has {self.blocks.pool.num_blocks}: raise num_blocks or"
                " lower max_tokens"
            )
        request = Request(self._next_id, tokens, params=params, prompt_len=len(tokens), priority=priority)
        request.arrival = self.counters.steps
        self._next_id += 1
        self.scheduler.add(request)
        return request

    def cancel(self, request: Request) -> None:
        """End a request wherever it is; its blocks return at once. Nothing happens to one that has ended."""
        if not request.status.final:
            self.scheduler.retire(request, Status.CANCELLED, "cancelled")
            self.counters.cancelled += 1
            self._count_blocks()

    def step(self) -> list[Emitted]:
        """Schedule, compute and sample once. Gives a token for each request that reached its next one.

        With `overlap` these are the tokens of the step before, so the first of some steps gives none. EngineError if
        the forward pass fails: the requests that were in it are FAILED, and hold no blocks.
        """
        chunks = self.scheduler.schedule()
        self._count_blocks()
        if chunks:
            with self._failing(chunks):
                self._launch(chunks)
        if not self._flights or (chunks and self._overlap and len(self._flights) < 2):
            return []
        flight = self._flights.popleft()
        with self._failing(flight.chunks):
            tokens = flight.tokens()
        return self._take(flight, tokens)

    def stream(self, prompt: Sized[int], params: SamplingParams | None = None, *, priority: int = 0) -> Iterator[int]:
        """The tokens of one request as they come, beside whatever else runs. Closing the iterator cancels it."""
        request = self.add(prompt, params, priority=priority)

        def tokens() -> Iterator[int]:
            sent = 0
            try:
                while True:
                    while sent < len(request.output):
                        sent += 1
                        yield request.output[sent - 1]
                    if request.status.final:
                        return
                    self.step()
            finally:
                self.cancel(request)

        return tokens()

    def generate(
        self, prompts: Sized[Sized[int]], params: SamplingParams | Sized[SamplingParams] | None = None
    ) -> list[list[int]]:
        """The generated tokens of each prompt, in order. params: one for all, or one for each.

        If any prompt is refused none is run, and if a step fails all are cancelled.
        """
        each = [params or SamplingParams()] * len(prompts) if not isinstance(params, Sized) else list(params)
        if len(each) != len(prompts):
            raise ValueError(f"params must be one or {len(prompts)}, one a prompt, and are {len(each)}")
        requests: list[Request] = []
        try:
            for prompt, its in zip(prompts, each, strict=True):
                requests.append(self.add(prompt, its))
            while not all(r.status.final for r in requests):
                self.step()
        finally:
            for request in requests:
                self.cancel(request)
        return [r.output for r in requests]

    @contextmanager
    def _failing(self, chunks: Sized[Chunk]) -> Iterator[None]:
        """Whatever is raised inside ends the requests of these chunks."""
        try:
            yield
        except BaseException as error:
            hit = [c.request for c in chunks if not c.request.status.final]
            for request in hit:
                request.error = error
                self.scheduler.retire(request, Status.FAILED, "failed")
                self.counters.failed += 1
            self._count_blocks()
            if not isinstance(error, Exception):  # the user's interrupt stays what it is
                raise
            ids = [r.id for r in hit]
            raise EngineError(f"the step of requests {ids} failed: {type(error).__name__}: {error}") from error

    def _launch(self, chunks: Sized[Chunk]) -> None:
        flight = self.runner.launch(chunks)
        self._flights.append(flight)
        for chunk in chunks:
            chunk.request.num_computed = chunk.start + chunk.length
            if chunk.decode:
                self.counters.decode_tokens += 1
            else:
                self.counters.prefill_tokens += chunk.length
        for chunk, row in zip(flight.sampling, flight.rows, strict=True):
            if not self._full(chunk.request, len(chunk.request) + 1):
                chunk.request.tokens.append(-1 - row)  # the next launch finds it on the device, in this row

    def _take(self, flight: Flight, tokens: Sized[int]) -> list[Emitted]:
        """Put the tokens in the place of those that stand for them, and end the requests that are done."""
        emitted = []
        for chunk in flight.chunks:
            self.blocks.remember(chunk.request, chunk.start, chunk.start + chunk.length)
        for chunk, token in zip(flight.sampling, tokens, strict=True):
            request, place = chunk.request, chunk.start + chunk.length
            if request.status.final:  # it was cancelled meanwhile, or ended with the token before
                self.counters.discarded_tokens += 1
                continue
            request.tokens[place : place + 1] = [token]
            reason = self._ends(request, token, place + 1)
            emitted.append(Emitted(request, token, reason))
            if reason:
                self.scheduler.retire(request, Status.FINISHED, reason)
                self.counters.finished += 1
        self._count_blocks()
        return emitted

    def _full(self, request: Request, length: int) -> bool:
        return length - request.prompt_len >= request.params.max_tokens or length >= self.max_model_len

    def _ends(self, request: Request, token: int, length: int) -> str:
        params = request.params
        if token in params.stop_token_ids or (token in self.config.eos_token_ids and not params.ignore_eos):
            return "stop"
        return "length" if self._full(request, length) else ""

    def _count_blocks(self) -> None:
        pool, running = self.blocks.pool, self.scheduler.running
        self.counters.blocks_used = pool.num_blocks - pool.num_free
        self.counters.blocks_peak = max(self.counters.blocks_peak, self.counters.blocks_used)
        self.counters.wasted_slots = sum(len(r.block_table) * pool.block_size - r.num_computed for r in running)

    def _blocks_that_fit(self, weights: Weights) -> int:
        """What kv_fraction of the free GPU memory holds; on a CPU what max_num_seqs of the longest sequences need."""
        size = self.options.block_size
        if weights.norm.device.type == "cpu":
            return self.options.max_num_seqs * -(-self.max_model_len // size)
        free, _ = torch.cuda.mem_get_info(weights.norm.device)
        blocks = int(free * self.options.kv_fraction) // self.config.kv_block_bytes(size, weights.norm.dtype)
        if blocks < 2:
            raise ValueError(f"{free / 2**30:.1f} GiB of free GPU memory hold no KV block: use a smaller model")
        return blocks - 1  # the cache has one more than the pool
