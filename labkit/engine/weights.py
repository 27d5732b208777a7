"""A model's weights: read from safetensors, or drawn at random for a benchmark of a shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.int4_repack import Int4Weight
from labkit.engine.config import ModelConfig
from labkit.models.tensors import open_tensors
from labkit.quant.int4_layers import joined, read_awq

Fetch = Callable[[str, tuple[int, ...]], Any]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv and gate_up are joined along their outputs: one matrix product instead of three, or two.

    Matrices may be in 4 bits, as Int4Weight.
    """

    input_norm: torch.Tensor
    qkv: torch.Tensor | Int4Weight
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor | Int4Weight
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor | Int4Weight
    down: torch.Tensor | Int4Weight


@dataclass(frozen=True)
class Weights:
    """All weights of a model, of one dtype on one device. Matrices are [out, in]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(
    folder: Path | str, config: ModelConfig, dtype: torch.dtype, device: torch.device | str, int4: bool = False
) -> Weights:
    """Read model.safetensors, or the files that model.safetensors.index.json names, tensor by tensor.

    Linears in AutoAWQ's format are dequantized, or with `int4` left in 4 bits for our kernels; dtype: then 16 bits.
    FileNotFoundError if there are none; ValueError for a missing tensor or one of another shape than config says.
    """
    holder = open_tensors(folder)

    def fetch(name: str, shape: tuple[int, ...]) -> Any:
        tensor: Any
        if (packed := name.removesuffix("weight") + "qweight") in holder:
            tensor = read_awq(holder, packed.removesuffix("qweight"), device)
        elif name in holder:
            tensor = holder[name].get_tensor(name)
        else:
            raise ValueError(f"{folder} holds no tensor {name}, which a {config.model_type} model needs")
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)} by config.json, and is {list(tensor.shape)}")
        if isinstance(tensor, torch.Tensor):
            return tensor.to(device, dtype)
        return tensor if int4 else tensor.dequantized().to(dtype)

    return _assemble(config, fetch)


def random_weights(config: ModelConfig, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> Weights:
    """Normal weights of standard deviation 0.02, norms of 1: what a benchmark of a shape needs, and no more."""
    generator = torch.Generator(device).manual_seed(seed)

    def draw(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if len(shape) == 1:
            return torch.ones(shape, dtype=dtype, device=device)
        return torch.empty(shape, dtype=dtype, device=device).normal_(0, 0.02, generator=generator)

    return _assemble(config, draw)


def _assemble(config: ModelConfig, fetch: Fetch) -> Weights:
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = fetch("model.embed_tokens.weight", (vocab, hidden))
    layers = tuple(_layer(config, fetch, f"model.layers.{i}.") for i in range(config.num_layers))
    norm = fetch("model.norm.weight", (hidden,))
    return Weights(
        embedding, layers, norm, embedding if config.tied_embeddings else fetch("lm_head.weight", (vocab, hidden))
    )


def _layer(config: ModelConfig, fetch: Fetch, prefix: str) -> LayerWeights:
    hidden, inner, dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.num_heads * dim, config.num_kv_heads * dim

    def get(name: str, *shape: int) -> Any:
        return fetch(f"{prefix}{name}.weight", shape)

    qkv = [get(f"self_attn.{n}_proj", size, hidden) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
    norm = get("input_layernorm", hidden)
    return LayerWeights(
        input_norm=norm,
        qkv=joined(qkv, norm.dtype),
        q_norm=get("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=get("self_attn.k_norm", dim) if config.qk_norm else None,
        output=joined([get("self_attn.o_proj", hidden, q_size)], norm.dtype),
        mlp_norm=get("post_attention_layernorm", hidden),
        gate_up=joined([get(f"mlp.{n}_proj", inner, hidden) for n in ("gate", "up")], norm.dtype),
        down=joined([get("mlp.down_proj", hidden, inner)], norm.dtype),
    )
