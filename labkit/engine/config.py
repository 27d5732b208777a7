"""The numbers of a model and of an engine, checked before anything is built."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.models import ModelShape

MODEL_TYPES = ("llama", "qwen3")
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class ModelConfig:
    """A dense decoder of the Llama or Qwen3 family; names are those of config.json.

    qk_norm: q and k are normalised head by head, which is what sets Qwen3 apart. rope_scaling: None or the values of
    rope type "llama3". dtype: of the checkpoint.
    """

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position: int
    qk_norm: bool
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    rope_scaling: dict[str, Any] | None = None
    tied_embeddings: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: torch.dtype = torch.bfloat16

    @classmethod
    def from_folder(cls, folder: Path | str) -> ModelConfig:
        """Read config.json. FileNotFoundError if there is none, ValueError for what this engine does not compute."""
        path = Path(folder) / "config.json"
        if not path.exists():
            raise FileNotFoundError(f"{folder} holds no config.json: give the folder of a checkpoint")
        return cls.from_dict(json.loads(path.read_text(encoding="utf-8")))

    @classmethod
    def from_dict(cls, raw: dict[str, Any]) -> ModelConfig:
        """From the content of config.json."""
        kind = raw.get("model_type")
        if kind not in MODEL_TYPES:
            raise ValueError(f"model_type must be one of {', '.join(MODEL_TYPES)}, and is {kind!r}")
        for key, value in (("attention_bias", False), ("mlp_bias", False), ("use_sliding_window", False)):
            if raw.get(key, value) != value:
                raise ValueError(f"{key} must be {value}, and is {raw[key]}: this engine does not compute it")
        if raw.get("hidden_act", "silu") != "silu":
            raise ValueError(f"hidden_act must be silu, and is {raw['hidden_act']!r}")
        dtype = str(raw.get("dtype") or raw.get("torch_dtype") or "float32").removeprefix("torch.")
        if dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, and is {dtype!r}")
        rope = raw.get("rope_parameters") or {"rope_theta": raw.get("rope_theta"), **(raw.get("rope_scaling") or {})}
        eos = raw.get("eos_token_id")
        heads = raw["num_attention_heads"]
        return cls(
            kind, raw["vocab_size"], raw["hidden_size"], raw["intermediate_size"], raw["num_hidden_layers"], heads,
            raw.get("num_key_value_heads") or heads, raw.get("head_dim") or raw["hidden_size"] // heads,
            raw["max_position_embeddings"], kind == "qwen3", raw.get("rms_norm_eps", 1e-6),
            rope.get("rope_theta") or 10000.0, _scaling(rope), bool(raw.get("tie_word_embeddings")),
            tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,), DTYPES[dtype],
        )  # fmt: skip

    @classmethod
    def from_shape(cls, shape: ModelShape, dtype: torch.dtype = torch.bfloat16) -> ModelConfig:
        """A model of a known shape, to be filled with random weights. ValueError for a hybrid shape."""
        if shape.state is not None or not shape.hidden_size:
            raise ValueError(f"shape {shape.name}: only dense decoders with all sizes given can be built")
        return cls(
            "qwen3" if shape.qk_norm else "llama", shape.vocab_size, shape.hidden_size, shape.intermediate_size,
            shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.max_position, shape.qk_norm,
            tied_embeddings=shape.tied_embeddings, dtype=dtype,
        )  # fmt: skip

    def kv_block_bytes(self, block_size: int, dtype: torch.dtype) -> int:
        """Bytes of K and V of one block in all layers."""
        return 2 * self.num_layers * block_size * self.num_kv_heads * self.head_dim * dtype.itemsize


def _scaling(rope: dict[str, Any]) -> dict[str, Any] | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind not in ("default", "llama3"):
        raise ValueError(f"rope_type must be default or llama3, and is {kind!r}")
    return rope if kind == "llama3" else None


@dataclass(frozen=True)
class EngineConfig:
    """How an engine runs. ValueError for values that do not go together.

    device: "cpu" or "cuda". dtype: None is float32 on a CPU and the checkpoint's on a GPU. kernels: "torch" (oracles in
    plain torch) or "triton" (ours; on a CPU in the interpreter); None is the one made for the device.
    num_blocks: of the KV cache; None is kv_fraction of the GPU memory that the weights leave free, or on a CPU what
    max_num_seqs requests of max_model_len need. max_model_len: None is the model's. graphs: "off"; "capture" (CUDA
    graphs; on a CPU the simulator of labkit.graph_simulator); "padded" runs without graphs what "capture" would run
    with them, at the same padded batch. capture_sizes: None is `default_sizes(max_num_seqs)`. overlap: whether a step
    is launched before the tokens of the one before it have come, so that the device need not wait for the host; tokens
    then leave `Engine.step` one step later. None: on a GPU. count_launches: also count the launches of eager steps.
    """

    device: str = "cpu"
    dtype: torch.dtype | None = None
    kernels: str | None = None
    block_size: int = 16
    num_blocks: int | None = None
    kv_fraction: float = 0.8
    max_model_len: int | None = None
    max_num_seqs: int = 8
    max_num_batched_tokens: int = 512
    prefix_caching: bool = True
    watermark: float = 0.0
    graphs: str = "off"
    capture_sizes: tuple[int, ...] | None = None
    overlap: bool | None = None
    count_launches: bool = False

    def __post_init__(self):
        for name in ("block_size", "max_num_seqs", "max_num_batched_tokens", "num_blocks", "max_model_len"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be at least 1, and is {value}")
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least max_num_seqs"
                f" ({self.max_num_seqs}), or some request could not decode in each step"
            )
        for name, allowed in (("kernels", (None, "torch", "triton")), ("graphs", ("off", "padded", "capture"))):
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {allowed}, and is {getattr(self, name)!r}")
        if not 0 <= self.watermark < 1 or not 0 < self.kv_fraction < 1:
            raise ValueError(f"watermark ({self.watermark}) and kv_fraction ({self.kv_fraction}) are parts of 1")
        if torch.device(self.device).type not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, and is {self.device!r}")
        if torch.device(self.device).type == "cuda" and not torch.cuda.is_available():
            raise ValueError(f"device is {self.device!r}, but torch sees no CUDA device here")
