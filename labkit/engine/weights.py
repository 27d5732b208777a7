"""A model's weights: read from safetensors, or drawn at random for a benchmark of a shape."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from labkit.engine.config import ModelConfig

Fetch = Callable[[str, tuple[int, ...]], torch.Tensor]


@dataclass(frozen=True)
class LayerWeights:
    """One layer. qkv and gate_up are joined along their outputs: one matrix product instead of three, or two."""

    input_norm: torch.Tensor
    qkv: torch.Tensor
    q_norm: torch.Tensor | None
    k_norm: torch.Tensor | None
    output: torch.Tensor
    mlp_norm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor


@dataclass(frozen=True)
class Weights:
    """All weights of a model, of one dtype on one device. Matrices are [out, in]."""

    embedding: torch.Tensor
    layers: tuple[LayerWeights, ...]
    norm: torch.Tensor
    head: torch.Tensor


def load_weights(folder: Path | str, config: ModelConfig, dtype: torch.dtype, device: torch.device | str) -> Weights:
    """Read model.safetensors, or the files that model.safetensors.index.json names, tensor by tensor.

    FileNotFoundError if there are none; ValueError for a missing tensor or one of another shape than config says.
    """
    from safetensors import safe_open

    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: give the folder of a safetensors checkpoint")
    files = [safe_open(folder / name, framework="pt") for name in names]
    holder = {key: file for file in files for key in file.keys()}  # noqa: SIM118

    def fetch(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name not in holder:
            raise ValueError(f"{folder} holds no tensor {name}, which a {config.model_type} model needs")
        tensor = holder[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"{name} must be {list(shape)} by config.json, and is {list(tensor.shape)}")
        return tensor.to(device, dtype)

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

    def get(name: str, *shape: int) -> torch.Tensor:
        return fetch(f"{prefix}{name}.weight", shape)

    qkv = [get(f"self_attn.{n}_proj", size, hidden) for n, size in (("q", q_size), ("k", kv_size), ("v", kv_size))]
    return LayerWeights(
        input_norm=get("input_layernorm", hidden),
        qkv=torch.cat(qkv),
        q_norm=get("self_attn.q_norm", dim) if config.qk_norm else None,
        k_norm=get("self_attn.k_norm", dim) if config.qk_norm else None,
        output=get("self_attn.o_proj", hidden, q_size),
        mlp_norm=get("post_attention_layernorm", hidden),
        gate_up=torch.cat([get(f"mlp.{n}_proj", inner, hidden) for n in ("gate", "up")]),
        down=get("mlp.down_proj", hidden, inner),
    )
