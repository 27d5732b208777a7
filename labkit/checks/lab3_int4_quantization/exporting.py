"""The layout of an AWQ checkpoint, written to files and read back as a server does."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from labkit.checks.compare import equal
from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED, packed, random_codes, same_words

awq_layout = Question("awq_layout", LAB, "a server finds each tensor by its name, in its shape and dtype", SHIPPED)

CONFIG = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 64, "tie_word_embeddings": True}
SIZES = {"model.layers.0.self_attn.q_proj": (64, 64), "model.layers.0.mlp.down_proj": (64, 128)}
BIAS = "model.layers.0.self_attn.q_proj.bias"  # is no weight, and stays


def small_model(group: int, seed: int = 0) -> tuple[dict[str, torch.Tensor], dict[str, tuple[torch.Tensor, ...]]]:
    """(state, quantized) of a model: two linears, one with a bias, an embedding that its head is tied to, a norm."""
    g = torch.Generator().manual_seed(seed)
    state = {"model.embed_tokens.weight": torch.randn(96, 64, generator=g), "model.norm.weight": torch.ones(64)}
    state["lm_head.weight"], state[BIAS] = state["model.embed_tokens.weight"], torch.randn(64, generator=g)
    quantized: dict[str, tuple[torch.Tensor, ...]] = {}
    for n, (name, (outputs, inputs)) in enumerate(SIZES.items()):
        groups = 1 if group == -1 else inputs // group
        state[f"{name}.weight"] = torch.randn(outputs, inputs, generator=g)
        scales = (0.1 * torch.rand(outputs, groups, generator=g)).half()
        codes, zeros = (random_codes(outputs, width, seed + n).cpu() for width in (inputs, groups))
        quantized[name] = codes, scales, zeros
    return state, quantized


def written(answer, state: dict, config: dict, quantized: dict) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """What stands in the files of an answer's layout."""
    from safetensors.torch import load_file, save_file

    tensors, settings = answer(state, config, quantized, packed)
    with tempfile.TemporaryDirectory() as folder:
        weights = Path(folder) / "model.safetensors"
        for name, tensor in tensors.items():
            require(tensor.is_contiguous(), f"{name} is not contiguous, and safetensors refuses such a view")
        save_file(tensors, weights, {"format": "pt"})
        (Path(folder) / "config.json").write_text(json.dumps(settings), encoding="utf-8")
        return load_file(weights), json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))


@awq_layout.invariant("each linear's three tensors hold its codes, zeros and scales", share=2)
def _(answer) -> None:
    for group in (32, -1):
        state, quantized = small_model(group)
        tensors, _ = written(answer, state, dict(CONFIG), quantized)
        for name, (codes, scales, zeros) in quantized.items():
            want = {"qweight": packed(codes.T), "qzeros": packed(zeros.T), "scales": scales.T.contiguous()}
            for key, tensor in want.items():
                require(f"{name}.{key}" in tensors, f"{name}.{key} is missing: a server would refuse to start")
                look_at = f"groups of {group}: the format has inputs (or groups) first, outputs last"
                same = equal if key == "scales" else same_words
                same(tensors[f"{name}.{key}"], tensor, f"{name}.{key}", look_at)


@awq_layout.invariant("all else is there once, in fp16, and no quantized weight stands beside its codes")
def _(answer) -> None:
    for tied in (True, False):
        state, quantized = small_model(64, seed=1)
        config = {**CONFIG, "tie_word_embeddings": tied}
        if not tied:
            state["lm_head.weight"] = state["lm_head.weight"] + 1
        tensors, _ = written(answer, state, config, quantized)
        parts = {f"{name}.{key}" for name in quantized for key in ("qweight", "qzeros", "scales")}
        want = {"model.embed_tokens.weight", "model.norm.weight", BIAS} | (set() if tied else {"lm_head.weight"})
        rest = set(tensors) - parts
        require(
            rest == want,
            f"tie_word_embeddings {tied}: besides the quantized ones there are {sorted(rest)}, {sorted(want)} expected",
        )
        for name in want:
            equal(tensors[name], state[name].half(), name)


@awq_layout.invariant("config.json says what is in the folder")
def _(answer) -> None:
    for group in (32, -1):
        state, quantized = small_model(group)
        before = dict(CONFIG)
        _, settings = written(answer, state, before, quantized)
        want = {"quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": True,
                "modules_to_not_convert": None}  # fmt: skip
        got = settings.get("quantization_config")
        require(got == want, f"quantization_config is {got}, {want} expected: a server reads the groups by it")
        kept = {**CONFIG, "dtype": "float16", "quantization_config": want}
        for key in sorted(kept.keys() | settings.keys()):
            found, entry = settings.get(key, "nothing"), kept.get(key, "nothing")
            require(found == entry, f"config.json: for {key} there is {found!r}, {entry!r} expected")
        require(before == CONFIG, "the configuration that was given was changed")


@awq_layout.invariant("scales that are not fp16 are refused by the name of their linear")
def _(answer) -> None:
    state, quantized = small_model(32)
    name = "model.layers.0.mlp.down_proj"
    codes, scales, zeros = quantized[name]
    quantized[name] = codes, scales.float() + 1e-5, zeros
    try:
        answer(state, dict(CONFIG), quantized, packed)
    except ValueError as error:
        require(name in str(error), f"the message must name {name}: {error}")
        return
    raise Failed("fp32 scales must raise ValueError: rounded now, they no longer fit the codes")


QUESTIONS = [awq_layout]
