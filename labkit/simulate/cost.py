"""What a step costs: bytes, FLOPs and launches, in seconds of one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.models import ModelShape
from labkit.models.shapes import QWEN3_8B

LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
"""Batch sizes for which a graph is captured, up to the 64 requests that the simulated server runs at a time."""


@dataclass(frozen=True)
class StepCost:
    """seconds = max(host, device): the slower of the two, as they work at the same time.

    host = launching + rows. eager, graph: seconds of launching, once a step. host_row: seconds for each request.
    device = max(weights, FLOPs) + KV + the rest. weight_bytes: read once a step, whatever the batch. kv_bytes: of one
    token, read for each token of context of each request. flops: for one token. bandwidth: bytes a second. peak:
    FLOP/s. rest: seconds that bytes and FLOPs do not explain, once a step. row: the same for each row, padding too.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    bandwidth: float
    peak: float
    eager: float
    graph: float
    host_row: float
    rest: float
    row: float

    @classmethod
    def of(cls, shape: ModelShape, **constants: float) -> StepCost:
        """For a dense model in 16 bits. constants: bandwidth, peak, eager, graph, host_row, rest, row."""
        weights = 2 * (shape.weight_count - (0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size))
        kv = shape.attention_layers * shape.kv_layer_bytes()
        return cls(weights, kv, flops=weights, **constants)  # a FLOP pair for each 2-byte weight

    def seconds(self, tokens: int, rows: int, context: int, graph: bool) -> float:
        """Of a step that computes `tokens` for `rows` requests (or padded rows) with `context` tokens of KV in all."""
        host = (self.graph if graph else self.eager) + rows * self.host_row
        work = max(self.weight_bytes / self.bandwidth, tokens * self.flops / self.peak)
        device = work + context * self.kv_bytes / self.bandwidth + self.rest + rows * self.row
        return max(host, device)


# vLLM 0.26 on an NVIDIA H200 as recorded in labkit/evidence/engine.nvidia-h200.json: decode steps of Qwen3-8B's shape
# at batch 1, 16, 64 and 128, prompt 128, output 128. The device copies 4.3 TB/s and multiplies at 790 TFLOP/s. `rest`
# and `row` are fitted to the four steps with graphs, `eager` and `host_row` to the four without, each for the smallest
# relative error; all eight come back within 3 %. The 15 batches of vllm.nvidia-h200.json, which nothing was fitted to,
# come within 6 %. A graph's launching is the published 2.5 us and 1 ns for each of 2,300 nodes.
QWEN3_8B_ON_H200 = StepCost.of(
    QWEN3_8B, bandwidth=4.3e12, peak=790e12, eager=20e-3, graph=5e-6, host_row=0.045e-3, rest=1.25e-3, row=0.0115e-3
)
