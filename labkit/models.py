"""Shapes of real models: what decides the size of a KV cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that its KV cache depends on.

    attention_layers: layers with a KV cache; in a hybrid model fewer than num_layers, since the others keep a state
    whose size does not depend on the sequence length.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_layers: int
