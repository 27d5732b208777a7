"""Turns a step's chunks into tensors, runs the model on them and sends the next tokens on their way to the host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from collections.abc import Sequence as Sized

import numpy as np
import torch

from kernels.sampling import sample
from labkit.engine.config import EngineConfig, ModelConfig
from labkit.engine.counters import Counters
from labkit.engine.graphs import Capture, CudaRecorder, GraphLadder, default_sizes, launches, simulated_capture
from labkit.engine.model import Decoder, rope_table
from labkit.engine.ops import Step, TorchOps
from labkit.engine.scheduler import Chunk
from labkit.engine.static_batch import StaticBatch, staged
from labkit.engine.weights import Weights


class Flight:
    """A step that was launched: its chunks, and the tokens it chooses, on their way to the host.

    sampling: the chunks that sample. rows: of `sampled`, one for each of them.
    """

    def __init__(self, chunks: Sized[Chunk], sampling: Sized[Chunk], rows: Sized[int], sampled: torch.Tensor):
        self.chunks, self.sampling, self.rows = chunks, sampling, rows
        self._landed: torch.cuda.Event | None = None
        if sampled.device.type == "cpu":
            self._host = sampled.clone()
            return
        self._host = torch.empty(sampled.shape, dtype=sampled.dtype, pin_memory=True)
        self._host.copy_(sampled, non_blocking=True)
        self._landed = torch.cuda.Event()
        self._landed.record()

    def tokens(self) -> list[int]:
        """Of the chunks that sample: the one wait for the device in a step."""
        if self._landed is not None:
            self._landed.synchronize()
        values = self._host.tolist()
        return [values[row] for row in self.rows]


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
        rope = rope_table(config, max_model_len, dtype, self.device)
        self.model = Decoder(weights, _ops(config, options, rope), self.cache)
        sizes = default_sizes(options.max_num_seqs) if options.capture_sizes is None else options.capture_sizes
        rows = max(*sizes, options.max_num_seqs, 1)
        self.sampled = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self._ladder: GraphLadder | None = None
        if options.graphs == "off":
            return
        self.static = StaticBatch(rows, -(-max_model_len // options.block_size), self.device)
        capture: Capture | None = None
        if options.graphs == "capture":
            capture = CudaRecorder() if self.device.type == "cuda" else simulated_capture
        with torch.no_grad():
            self._ladder = GraphLadder(sizes, lambda size: lambda: self._decode(size), capture)
        if capture is not None:
            counters.captures += len(self._ladder.sizes)

    @torch.no_grad()
    def launch(self, chunks: Sized[Chunk]) -> Flight:
        """Compute the chunks and choose the next token of each that reaches its request's newest one.

        A token of -1 - i in a request stands for the one that row i of the launch before chose. Does not wait.
        """
        self._counters.steps += 1
        size = None
        if self._ladder is not None and all(c.length == 1 for c in chunks):
            size = self._ladder.size_for(len(chunks))
        samples = [i for i, c in enumerate(chunks) if c.samples]
        if size is not None:
            rows, (logits,) = samples, self._run_padded(chunks, size)
        else:
            rows, logits = list(range(len(samples))), self._run_eager(chunks, samples)
        sampling = [chunks[i] for i in samples]
        self._sample(sampling, rows, logits)
        return Flight(chunks, sampling, rows, self.sampled[: rows[-1] + 1 if rows else 0])

    def _run_padded(self, chunks: Sized[Chunk], size: int) -> tuple[torch.Tensor, ...]:
        assert self._ladder is not None
        self.static.fill(chunks, size, self._options.block_size)
        self._counters.padded_rows += size - len(chunks)
        if self._ladder.captured:
            self._counters.graph_steps += 1
            self._counters.replays += 1
            self._counters.launches += 1
            return self._ladder.run(size)
        self._counters.eager_steps += 1
        with self._counted():
            return self._ladder.run(size)

    def _decode(self, size: int) -> tuple[torch.Tensor]:
        """One token for each of the first `size` rows of the static batch: what a graph holds."""
        tokens, step = self.static.rows(size)
        logits = self.model.logits(self.model.forward(tokens, self.sampled, step))
        self.model.ops.choose(logits, self.sampled)
        return (logits,)

    def _run_eager(self, chunks: Sized[Chunk], samples: Sized[int]) -> torch.Tensor:
        """All tokens of all chunks, packed; logits of those chunks that sample, in order."""
        self._counters.eager_steps += 1
        size, lengths = self._options.block_size, [c.length for c in chunks]
        starts = np.cumsum([0, *lengths])
        positions = np.concatenate([np.arange(c.start, c.start + c.length) for c in chunks])
        tokens = np.concatenate([c.request.tokens[c.start : c.start + c.length] for c in chunks])
        table = np.zeros((len(chunks), max(len(c.request.block_table) for c in chunks)), np.int32)
        for row, chunk in zip(table, chunks, strict=True):
            row[: len(chunk.request.block_table)] = chunk.request.block_table
        slots = table[np.repeat(np.arange(len(chunks)), lengths), positions // size] * size + positions % size
        lens = [c.start + c.length for c in chunks]
        tokens_, positions_, slots_, lens_, starts_, last, table_ = self._send(
            tokens, positions, slots, lens, starts, [starts[i + 1] - 1 for i in samples], table.ravel()
        )
        step = Step(positions_, slots_, table_.view(table.shape), lens_, starts_)
        with self._counted():
            hidden = self.model.forward(tokens_, self.sampled, step).index_select(0, last)
            if not samples:
                return hidden
            logits = self.model.logits(hidden)
            self.model.ops.choose(logits, self.sampled)
            return logits

    def _sample(self, chunks: Sized[Chunk], rows: Sized[int], logits: torch.Tensor) -> None:
        """Replace the greedy choice of the rows whose requests want another."""
        random = [(row, c.request) for row, c in zip(rows, chunks, strict=True) if c.request.params.temperature]
        if not random:
            return
        params = [request.params for _, request in random]
        index, seeds, positions = [row for row, _ in random], [p.seed for p in params], [len(r) for _, r in random]
        floats = np.array([[p.temperature for p in params], [p.top_p for p in params]], np.float32).view(np.int32)
        index_, seeds_, positions_, temperatures, top_ps = self._send(index, seeds, positions, *floats)
        chosen = sample(
            logits.index_select(0, index_), temperatures.view(torch.float32), top_ps.view(torch.float32),
            seeds_.long(), positions_.long(),
        )  # fmt: skip
        self.sampled.index_copy_(0, index_.long(), chosen.int())

    def _send(self, *values: Sized[int] | np.ndarray) -> list[torch.Tensor]:
        """Int32 arrays on the device, by one copy; each begins at a multiple of 16 bytes."""
        arrays = [np.asarray(v, np.int32) for v in values]
        begins = np.cumsum([0, *(-(-a.size // 4) * 4 for a in arrays)])
        packed = np.zeros(begins[-1], np.int32)
        for begin, array in zip(begins, arrays, strict=False):
            packed[begin : begin + array.size] = array
        sent = staged(packed, self.device).to(self.device, non_blocking=True)
        return [sent[begin : begin + a.size] for begin, a in zip(begins.tolist(), arrays, strict=False)]

    @contextlib.contextmanager
    def _counted(self) -> Iterator[None]:
        if not self._options.count_launches:
            yield
            return
        with launches() as log:
            yield
        self._counters.launches += log.count


def _ops(config: ModelConfig, options: EngineConfig, rope: torch.Tensor) -> TorchOps:
    kind = options.kernels or ("triton" if rope.device.type == "cuda" else "torch")
    if kind == "torch":
        return TorchOps(config, rope)
    from labkit.engine.triton_ops import TritonOps  # where nobody wants kernels, Triton need not be there

    return TritonOps(config, rope)
