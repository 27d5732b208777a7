"""What a step costs: bytes, FLOPs and launches, in seconds of one GPU."""

from __future__ import annotations

from dataclasses import dataclass

from labkit.models import ModelShape
from labkit.models.shapes import QWEN3_8B

LADDER = (1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64)
"""Batch sizes for which a graph is captured, up to the 64 requests that the simulated server runs at a time."""


@dataclass(frozen=True)
class StepCost:
    """seconds = max(weights, FLOPs) + KV + launching + rows.

    weight_bytes: read once a step, whatever the batch. kv_bytes: of one token, read for each token of context of each
    request. flops: for one token. bandwidth: bytes a second. peak: FLOP/s. eager, graph: seconds of launching, once a
    step. row: seconds that the host and the sampler take for each request in the batch, or row of padding.
    """

    weight_bytes: float
    kv_bytes: float
    flops: float
    bandwidth: float
    peak: float
    eager: float
    graph: float
    row: float

    @classmethod
    def of(
        cls, shape: ModelShape, *, bandwidth: float, peak: float, eager: float, graph: float, row: float
    ) -> StepCost:
        """For a dense model in 16 bits."""
        weights = 2 * (shape.weight_count - (0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size))
        kv = shape.attention_layers * shape.kv_layer_bytes()
        return cls(weights, kv, weights, bandwidth, peak, eager, graph, row)  # a FLOP pair for each 2-byte weight

    def seconds(self, tokens: int, rows: int, context: int, graph: bool) -> float:
        """Of a step that computes `tokens` for `rows` requests (or padded rows) with `context` tokens of KV in all."""
        work = max(self.weight_bytes / self.bandwidth, tokens * self.flops / self.peak)
        return work + context * self.kv_bytes / self.bandwidth + (self.graph if graph else self.eager) + rows * self.row


# vLLM 0.26 on an NVIDIA H200, Qwen3-8B's shape in bf16, prompt 128, output 128: with graphs 5.24 / 5.67 / 10.4 ms a
# step at batch 1 / 16 / 128, without 23.5 / 25.8 / 27.8 ms. The device copies 4.3 TB/s and multiplies at 790 TFLOP/s.
# What bytes and FLOPs do not explain of those six figures is `graph`, `eager` and `row`; they come back within 10 %. (A
# later run, which is recorded in labkit/evidence, was faster: 4.9 / 4.9 / 7.3 and 20.5 / 20.8 / 26.4 ms.)
QWEN3_8B_ON_H200 = StepCost.of(QWEN3_8B, bandwidth=4.3e12, peak=790e12, eager=19.9e-3, graph=1.5e-3, row=0.031e-3)
