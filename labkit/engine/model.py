"""The forward pass of a Llama or Qwen3 decoder over a paged cache, as functions of weights.

Numbers follow transformers step by step (norms in float32, rope on halves), so that greedy tokens are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from labkit.engine.attention import Attention, Step
from labkit.engine.config import ModelConfig
from labkit.engine.weights import LayerWeights, Weights


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, the quotient in float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The sum of both, normalised, and the sum."""
    total = x + residual
    return rms_norm(total, weight, eps), total


def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head. x: [num_tokens, heads, head_dim]. cos, sin: [num_tokens, head_dim]."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None, :] + torch.cat((-high, low), -1) * sin[:, None, :]


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of the joined product."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate) * up


def rope_table(config: ModelConfig, length: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """cos and sin of all positions: [2, length, head_dim]."""
    frequency = 1.0 / config.rope_theta ** (torch.arange(0, config.head_dim, 2).float() / config.head_dim)
    if config.rope_scaling is not None:
        frequency = _llama3(frequency, config.rope_scaling)
    angles = torch.outer(torch.arange(length).float(), frequency).repeat(1, 2)
    return torch.stack((angles.cos(), angles.sin())).to(device, dtype)


def _llama3(frequency: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's stretch: long waves slowed by `factor`, short ones kept, a ramp between (arXiv 2407.21783)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    turns = scaling["original_max_position_embeddings"] / wavelength
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])


class Decoder:
    """Computes hidden states of new tokens; K and V go to the cache.

    cache: [num_layers, 2, num_blocks, block_size, num_kv_heads, head_dim]. length: positions of the rope table. fuse:
    whether norms, rope and activation go through torch.compile.
    """

    def __init__(
        self, config: ModelConfig, weights: Weights, attention: Attention, cache: torch.Tensor, length: int, fuse: bool
    ):
        self.config, self.weights, self.cache = config, weights, cache
        self._attention = attention
        self._table = rope_table(config, length, cache.dtype, cache.device)
        wrap: Callable[[Any], Any] = (lambda f: torch.compile(f, dynamic=True)) if fuse else (lambda f: f)
        self._norm, self._add_norm = wrap(rms_norm), wrap(add_rms_norm)
        self._rope, self._silu_mul = wrap(rope), wrap(silu_mul)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor, step: Step) -> torch.Tensor:
        """tokens, positions: [num_tokens] int32. Gives hidden states after the last norm, [num_tokens, hidden_size]."""
        eps = self.config.rms_norm_eps
        cos, sin = self._table[:, positions.long()]
        total = F.embedding(tokens, self.weights.embedding)
        first, *others = self.weights.layers
        x = self._norm(total, first.input_norm, eps)
        for i, layer in enumerate((first, *others)):
            x = self._attend(layer, x, cos, sin, self.cache[i], step)
            x, total = self._add_norm(x, total, layer.mlp_norm, eps)
            x = F.linear(self._silu_mul(F.linear(x, layer.gate_up)), layer.down)
            following = others[i].input_norm if i < len(others) else self.weights.norm
            x, total = self._add_norm(x, total, following, eps)
        return x

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size]."""
        return F.linear(hidden, self.weights.head)

    def _attend(
        self, layer: LayerWeights, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, cache: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:  # fmt: skip
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        qkv = F.linear(x, layer.qkv).unflatten(-1, (heads + 2 * kv_heads, dim))
        q, k, v = qkv.split((heads, kv_heads, kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q = self._norm(q, layer.q_norm, self.config.rms_norm_eps)
            k = self._norm(k, layer.k_norm, self.config.rms_norm_eps)
        q, k = self._rope(q, cos, sin), self._rope(k, cos, sin)
        return F.linear(self._attention(q, k, v, cache[0], cache[1], step).flatten(1), layer.output)
