"""Quantized models as folders that vLLM and transformers know: AutoAWQ's GEMM format, and compressed-tensors.

What is not quantized (embeddings, norms, output head) is stored in fp16. Both formats hold group sizes that divide each
layer's inputs, and PER_CHANNEL; linears that a runtime fuses (q, k, v; gate, up) must share one scheme.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.models.files import written_whole
from labkit.quant.grid import PER_CHANNEL, Quantized, Scheme
from labkit.quant.inputs import linears_of
from labkit.quant.packing import from_awq, from_compressed_tensors, to_awq, to_compressed_tensors

WEIGHTS = "model.safetensors"


def write_awq(model: nn.Module, quantized: Mapping[str, Quantized], folder: Path | str, tokenizer: Any = None) -> Path:
    """Write `model` to a new `folder` in the AutoAWQ GEMM format, and give that folder.

    model: with norms and linears as they were when its weights were quantized: AWQ's scales are folded into them.
    quantized: each of its decoder linears by name, as `quantize_rtn` and `quantize_gptq` give them, with fp16 scales.
    tokenizer: one of transformers, saved beside. FileExistsError where the folder holds something; ValueError for what
    the format cannot hold.
    """
    scheme = _common_scheme(model, quantized)
    config = {
        "quant_method": "awq",
        "version": "gemm",
        "bits": scheme.bits,
        "group_size": scheme.group_size,
        "zero_point": True,  # symmetric ones, too, store their zeros
        "modules_to_not_convert": None,
    }
    return _write(model, quantized, Path(folder), tokenizer, config, to_awq)


def write_compressed_tensors(
    model: nn.Module, quantized: Mapping[str, Quantized], folder: Path | str, tokenizer: Any = None
) -> Path:
    """Write `model` to a new `folder` in the pack-quantized format of compressed-tensors; else like `write_awq`."""
    scheme = _common_scheme(model, quantized)
    rows = scheme.group_size == PER_CHANNEL
    weights = {
        "num_bits": scheme.bits,
        "type": "int",
        "symmetric": scheme.symmetric,
        "strategy": "channel" if rows else "group",
        "group_size": None if rows else scheme.group_size,
        "dynamic": False,
    }
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    config = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }
    return _write(model, quantized, Path(folder), tokenizer, config, to_compressed_tensors)


def read_quantized(folder: Path | str) -> dict[str, Quantized]:
    """The quantized matrices of a checkpoint in one of the two formats, by the name of their linear.

    ValueError if config.json names another format, and FileNotFoundError if there is none.
    """
    folder = Path(folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("quantization_config", {})
    formats: dict[tuple[str | None, str | None], tuple[str, Callable]] = {
        ("awq", "gemm"): (".qweight", from_awq),
        ("compressed-tensors", "pack-quantized"): (".weight_packed", from_compressed_tensors),
    }
    method = config.get("quant_method")  # the version that compressed-tensors names is the library's
    kind = method, config.get("version" if method == "awq" else "format")
    if kind not in formats:
        raise ValueError(f"{folder} must be in AutoAWQ's GEMM format or pack-quantized, and says {kind}")
    ending, read = formats[kind]
    tensors = _tensors(folder)
    names = [name.removesuffix(ending) for name in tensors if name.endswith(ending)]
    return {name: read(_part(tensors, f"{name}.")) for name in names}


@torch.no_grad()
def dequantize_into(model: nn.Module, folder: Path | str) -> nn.Module:
    """Give `model` the weights of a checkpoint that was made of it, dequantized, and give it back.

    What transformers cannot do for AutoAWQ's format without a GPU. ValueError, with the model as it was, where a tensor
    of the model is neither in the checkpoint nor tied to one that is, or has another shape there.
    """
    folder = Path(folder)
    state = _tensors(folder) | {f"{name}.weight": one.dequantize() for name, one in read_quantized(folder).items()}
    for name, tensor in model.named_parameters():  # names a tied one once
        if name not in state or state[name].shape != tensor.shape:
            found = list(state[name].shape) if name in state else "nothing"
            raise ValueError(f"{folder} must hold {name} of {list(tensor.shape)}, and has {found}")
    for name, tensor in model.named_parameters():
        tensor.copy_(state[name])
    return model


def _tensors(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for path in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(path).items()}


def _part(tensors: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _common_scheme(model: nn.Module, quantized: Mapping[str, Quantized]) -> Scheme:
    linears = linears_of(model)
    if quantized.keys() != linears.keys():
        other = sorted(quantized.keys() ^ linears.keys())
        raise ValueError(f"quantized must hold each decoder linear of model and nothing else; look at {other[0]}")
    for name, linear in linears.items():
        if quantized[name].codes.shape != linear.weight.shape:
            raise ValueError(
                f"quantized[{name!r}] is {list(quantized[name].codes.shape)}, its linear {list(linear.weight.shape)}"
            )
    schemes = {one.scheme for one in quantized.values()}
    if len(schemes) != 1:
        raise ValueError(f"quantized has {len(schemes)} schemes, and config.json holds one")
    return schemes.pop()


def _write(
    model: Any,
    quantized: Mapping[str, Quantized],
    folder: Path,
    tokenizer: Any,
    quantization: dict[str, Any],
    pack: Callable[[Quantized], dict[str, torch.Tensor]],
) -> Path:
    from safetensors.torch import save_file

    if folder.exists() and any(folder.iterdir()):
        raise FileExistsError(f"{folder} is not empty: give a new folder")
    # A model that was not loaded from a folder lacks its architecture, and vLLM would take it for one that embeds.
    named = {"architectures": [type(model).__name__], "dtype": "float16", "quantization_config": quantization}
    config = model.config.to_dict() | named
    tensors: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        owner = name.removesuffix(".weight")
        if owner in quantized:
            tensors |= {f"{owner}.{key}": part for key, part in pack(quantized[owner]).items()}
        elif not (owner == "lm_head" and model.config.tie_word_embeddings):
            half = tensor.half()
            if not bool(torch.isfinite(half).all()):
                raise ValueError(f"{name} holds numbers beyond fp16, in which it is stored")
            tensors[name] = half
    with written_whole(folder) as new:
        save_file({name: t.contiguous().cpu() for name, t in tensors.items()}, new / WEIGHTS, {"format": "pt"})
        (new / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
        model.generation_config.save_pretrained(new)
        if tokenizer is not None:
            tokenizer.save_pretrained(new)
    return folder
