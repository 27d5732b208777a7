"""Turns a step's chunks into tensors, runs the model on them and gives the next tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence as Sized

import numpy as np
import torch

from labkit.engine.attention import Attention, Step, TorchAttention, TritonAttention
from labkit.engine.config import EngineConfig, ModelConfig
from labkit.engine.counters import Counters
from labkit.engine.graphs import Capture, CudaRecorder, GraphLadder, default_sizes, launches, simulated_capture
from labkit.engine.model import Decoder
from labkit.engine.sampling import sample
from labkit.engine.scheduler import Chunk
from labkit.engine.static_batch import StaticBatch
from labkit.engine.weights import Weights


class ModelRunner:
    """The model with its cache. Steps of one token a sequence go through the graph ladder, others run eagerly.

    max_model_len: tokens of the longest sequence; the static block table is wide enough for it. num_blocks: of the
    cache, which gets one more: padding of the torch backend is written there.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, options: EngineConfig, *,
        max_model_len: int, num_blocks: int, counters: Counters,
    ):  # fmt: skip
        self.device, self._options, self._counters = weights.norm.device, options, counters
        dtype = weights.norm.dtype
        shape = (config.num_layers, 2, num_blocks + 1, options.block_size, config.num_kv_heads, config.head_dim)
        self.cache = torch.zeros(shape, dtype=dtype, device=self.device)
        attention = _attention(config, options, dtype, self.device)
        self.model = Decoder(config, weights, attention, self.cache, max_model_len, options.fuse)
        self._ladder: GraphLadder | None = None
        if options.graphs == "off":
            return
        sizes = options.capture_sizes
        sizes = default_sizes(options.max_num_seqs) if sizes is None else sizes
        self.static = StaticBatch(max(sizes, default=1), -(-max_model_len // options.block_size), self.device)
        capture: Capture | None = None
        if options.graphs == "capture":
            capture = CudaRecorder() if self.device.type == "cuda" else simulated_capture
        with torch.no_grad():
            self._ladder = GraphLadder(sizes, lambda size: lambda: self._decode(size), capture)
        if capture is not None:
            counters.captures += len(self._ladder.sizes)

    @torch.no_grad()
    def run(self, chunks: Sized[Chunk]) -> list[int]:
        """Compute the chunks. Gives the next token of each that reaches its request's newest token, in their order."""
        self._counters.steps += 1
        size = None
        if self._ladder is not None and all(c.length == 1 for c in chunks):
            size = self._ladder.size_for(len(chunks))
        logits, best = self._run_padded(chunks, size) if size is not None else self._run_eager(chunks)
        return self._choose(chunks, logits, best)

    def _run_padded(self, chunks: Sized[Chunk], size: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._ladder is not None
        self.static.fill(chunks, size, self._options.block_size)
        self._counters.padded_rows += size - len(chunks)
        if self._ladder.captured:
            self._counters.graph_steps += 1
            self._counters.replays += 1
            self._counters.launches += 1
            return self._ladder.run(size)  # type: ignore[return-value]
        self._counters.eager_steps += 1
        with self._counted():
            return self._ladder.run(size)  # type: ignore[return-value]

    def _decode(self, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One token for each of the first `size` rows of the static batch: what a graph holds."""
        tokens, positions, step = self.static.rows(size)
        logits = self.model.logits(self.model.forward(tokens, positions, step))
        return logits, logits.argmax(-1)

    def _run_eager(self, chunks: Sized[Chunk]) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens of all chunks, packed; logits of each chunk's last token."""
        self._counters.eager_steps += 1
        size = self._options.block_size
        starts = np.cumsum([0] + [c.length for c in chunks])
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
        tokens = np.concatenate([c.request.tokens[c.start : c.start + c.length] for c in chunks])
        table = np.zeros((len(chunks), max(len(c.request.block_table) for c in chunks)), np.int32)
        for row, chunk in zip(table, chunks, strict=True):
            row[: len(chunk.request.block_table)] = chunk.request.block_table
        owner = np.repeat(np.arange(len(chunks)), [c.length for c in chunks])
        slots = table[owner, positions // size] * size + positions % size
        lens = [c.start + c.length for c in chunks]
        on_device = [self._send(x) for x in (tokens, positions, slots, table, lens, starts, starts[1:] - 1)]
        step = Step(on_device[2], on_device[3], on_device[4], on_device[5])
        with self._counted():
            hidden = self.model.forward(on_device[0], on_device[1], step)
            logits = self.model.logits(hidden.index_select(0, on_device[6]))
            return logits, logits.argmax(-1)

    def _choose(self, chunks: Sized[Chunk], logits: torch.Tensor, best: torch.Tensor) -> list[int]:
        """Tokens of the rows that sample; the one wait for the device in a step."""
        rows = [i for i, c in enumerate(chunks) if c.samples]
        params = [chunks[i].request.params for i in rows]
        if all(p.temperature == 0 for p in params):
            chosen = best.tolist()
            return [chosen[i] for i in rows]
        index, seeds, positions = (
            torch.tensor(x, device=self.device)
            for x in (rows, [p.seed for p in params], [len(chunks[i].request) for i in rows])
        )
        temperatures, top_ps = (
            torch.tensor(x, dtype=torch.float32, device=self.device)
            for x in ([p.temperature for p in params], [p.top_p for p in params])
        )
        return sample(logits.index_select(0, index), temperatures, top_ps, seeds, positions).tolist()

    def _send(self, values: Sized[int] | np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values, np.int32)).to(self.device, non_blocking=True)

    @contextlib.contextmanager
    def _counted(self):
        if not self._options.count_launches:
            yield
            return
        with launches() as log:
            yield
        self._counters.launches += log.count


def _attention(config: ModelConfig, options: EngineConfig, dtype: torch.dtype, device: torch.device) -> Attention:
    kind = options.attention or ("triton" if device.type == "cuda" else "torch")
    if kind == "torch":
        return TorchAttention()
    return TritonAttention(config.num_heads, config.num_kv_heads, config.head_dim, dtype, device)
