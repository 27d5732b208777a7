"""The forward pass of a Llama or Qwen3 decoder over a paged cache."""

from __future__ import annotations

import torch

from labkit.engine.config import ModelConfig
from labkit.engine.ops import Step, TorchOps
from labkit.engine.weights import Weights
from labkit.models.rope import llama3


def rope_table(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """cos and sin of all positions: [2, length, head_dim]."""
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling is not None:
        frequency = llama3(frequency, config.rope_scaling)
    angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin())).to(device, dtype)


class Decoder:
    """Computes hidden states and logits of new tokens; K and V go to the cache.

    ops: how. cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim].
    """

    def __init__(self, weights: Weights, ops: TorchOps, cache: torch.Tensor):
        self.weights, self.ops, self.cache = weights, ops, cache

    def forward(self, tokens: torch.Tensor, sampled: torch.Tensor, step: Step) -> torch.Tensor:
        """Hidden states after the last norm, [num_tokens, hidden_size].

        tokens: [num_tokens] int32; -1 - i stands for sampled[i], which the step before chose.
        """
        ops, layers = self.ops, self.weights.layers
        norms = [*(layer.input_norm for layer in layers[1:]), self.weights.norm]
        x, total = ops.norm(ops.embed(tokens, sampled, self.weights.embedding), None, layers[0].input_norm)
        for layer, cache, following in zip(layers, self.cache, norms, strict=True):
            attended = ops.attend(ops.linear(x, layer.qkv), layer, cache, step)
            x, total = ops.norm(ops.linear(attended, layer.output), total, layer.mlp_norm)
            x, total = ops.norm(ops.linear(ops.gated(x, layer.gate_up), layer.down), total, following)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size]."""
        return self.ops.logits(hidden, self.weights.head)
