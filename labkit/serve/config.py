"""The shape of a model from the config.json that comes with its weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from labkit.models.shapes import ModelShape, RecurrentState
from labkit.serve.values import whole

ATTENDS, RECURS = "full_attention", "linear_attention"
STATE = (
    "linear_num_key_heads",
    "linear_num_value_heads",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_conv_kernel_dim",
)


def shape_of(model: Mapping[str, Any] | Path | str) -> ModelShape:
    """The shape that a config.json states, for decoders of the Llama and Qwen3 families, hybrid ones included.

    model: its contents, or the folder that holds it. ValueError says what is missing, no number, or of another family.
    """
    found = model if isinstance(model, Mapping) else _read(model)
    config = {**found, **(found.get("text_config") or {})}
    _check_there(config, ("num_hidden_layers", "num_attention_heads", "hidden_size"))
    layers, heads, hidden = (
        whole(f"model: {name}", config[name]) for name in ("num_hidden_layers", "num_attention_heads", "hidden_size")
    )
    sizes = {
        name: whole(f"model: {name}", config.get(name) or 0, 0)
        for name in ("num_key_value_heads", "head_dim", "intermediate_size", "vocab_size", "max_position_embeddings")
    }
    kinds = config.get("layer_types") or [ATTENDS] * layers
    if len(kinds) != layers or not set(kinds) <= {ATTENDS, RECURS}:
        said = f"{len(kinds)}: {', '.join(sorted(set(kinds)))}"
        raise ValueError(f"model: layer_types must be {layers} times {ATTENDS} or {RECURS}, and are {said}")
    if ATTENDS not in kinds:
        raise ValueError("model: none of its layers attends, so that it has no KV cache")
    state = None
    if RECURS in kinds:
        _check_there(config, STATE)
        state = RecurrentState(*(whole(f"model: {name}", config[name]) for name in STATE))
    return ModelShape(
        str(config.get("_name_or_path") or config.get("model_type", "model")), layers, heads,
        sizes["num_key_value_heads"] or heads, sizes["head_dim"] or hidden // heads, kinds.count(ATTENDS),
        hidden_size=hidden, intermediate_size=sizes["intermediate_size"], vocab_size=sizes["vocab_size"],
        tied_embeddings=bool(config.get("tie_word_embeddings")), qk_norm="qwen3" in config.get("model_type", ""),
        max_position=sizes["max_position_embeddings"], state=state, parameters=config.get("parameters"),
    )  # fmt: skip


def _read(folder: Path | str) -> Mapping[str, Any]:
    if not isinstance(folder, Path | str):
        raise ValueError(f"model must be a shape, a config.json as a dictionary, or its folder, and is {folder!r}")
    path = Path(folder) / "config.json"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"model: {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"model: {path} is no JSON: {error}") from None
    if not isinstance(found, Mapping):
        raise ValueError(f"model: {path} holds no dictionary")
    return found


def _check_there(config: Mapping[str, Any], names: tuple[str, ...]) -> None:
    if missing := [name for name in names if config.get(name) is None]:
        raise ValueError(f"model: its config.json lacks {', '.join(missing)}")
