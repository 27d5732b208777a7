"""Tiny models to quantize, and what they read."""

from __future__ import annotations

import copy

import pytest
import torch

SIZES = {
    "vocab_size": 256,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "initializer_range": 0.1,
}


def build(family: str):
    """A model with random weights, norms that are not all alike, and a few loud channels, in fp32."""
    import transformers

    config, model = {
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
        "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
    }[family]
    sizes = {k: v for k, v in SIZES.items() if k != "head_dim" or family != "qwen2"}
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        made = model(config(**sizes, tie_word_embeddings=False)).float().eval()
        for layer in made.model.layers:
            for norm in (layer.input_layernorm, layer.post_attention_layernorm):
                norm.weight.copy_(torch.rand(128) + 0.5)
                norm.weight[::32] *= 20
    return made


@pytest.fixture(scope="session", params=["llama", "qwen3", "qwen2"])
def any_family(request):
    return build(request.param)


@pytest.fixture(scope="session")
def pristine():
    return build("qwen3")


@pytest.fixture
def model(pristine):
    return copy.deepcopy(pristine)


@pytest.fixture(scope="session")
def tokens():
    """Calibration, [8, 64]."""
    return torch.randint(0, 256, (8, 64), generator=torch.Generator().manual_seed(1))
