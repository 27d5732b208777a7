"""What a launch line will hold: weights, activations and graphs off the budget, the rest in blocks of KV cache.

The arithmetic of blocks is vLLM's own (v1/core/kv_cache_utils.py, `get_kv_cache_capacity`), so where the bytes of the
KV cache are given (`kv_cache_memory`) the plan is exact. Where they are what is left of a GPU's memory, activations and
graphs are estimates; they are a few percent of a GPU that the model suits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from labkit.models.shapes import ModelShape
from labkit.serve.config import shape_of
from labkit.serve.launch import Launch, on_cpu
from labkit.serve.values import is_number, whole

GIB = 1 << 30
# Bits of a weight in a linear layer, scales and zero points included (int4: groups of 128 with fp16 scales).
WEIGHT_BITS = {"float32": 32.0, "bfloat16": 16.0, "float16": 16.0, "fp8": 8.0, "int4": 4 + (16 + 4) / 128}
KV_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "fp8_e4m3": 1, "fp8_e5m2": 1}
DEFAULTS = {"cpu": (128, 32), "cuda": (16, 16)}  # tokens of a block, and what a block must be a multiple of
UTILIZATION = 0.92
BATCHED_TOKENS, SEQUENCES = 8192, 1024  # of one step, as vLLM's server chooses on a GPU of 70 GiB and more
CPU_HEAD_DIMS = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)
GRAPH_BYTES = 8 << 20  # of a captured batch size; the pool of intermediate results is shared by all sizes
CONTEXT_BYTES = 600 << 20  # CUDA's context and the libraries' workspaces


class Inconsistent(ValueError):
    """A launch line that cannot work; the message says why, and what would."""


@dataclass(frozen=True)
class Plan:
    """Sizes in bytes, lengths in tokens. blocks: of block_size tokens, in the KV cache.

    kv_tokens and max_concurrency are what vLLM reports: of requests of max_model_len tokens, max_concurrency fit at
    once, and kv_tokens is that many times max_model_len, which for a hybrid model is less than blocks * block_size.
    """

    weights: int
    activations: int
    graphs: int
    context: int
    kv_cache: int
    kv_bytes_per_token: int
    block_size: int
    blocks: int
    max_model_len: int
    kv_tokens: int
    max_concurrency: float

    def parts(self) -> dict[str, int]:
        """Bytes of each part, for a table or a chart."""
        names = ("weights", "activations", "graphs", "context", "kv_cache")
        return {name.replace("_", " "): getattr(self, name) for name in names}


def plan_capacity(
    model: ModelShape | Mapping[str, Any] | Path | str,
    launch: Launch,
    *,
    memory: int | None = None,
    weights: str | None = None,
    device: str | None = None,
) -> Plan:
    """What `launch` will hold of requests to `model`; with tensor parallelism, on each of its devices.

    model: a shape, a config.json as a dictionary, or a folder that holds one. memory: bytes of the device, needed where
    the launch line does not fix the KV cache. weights: a format of WEIGHT_BITS; None is the launch line's dtype.
    device: "cpu" or "cuda"; None is what the installed vLLM is built for.

    Inconsistent with the reason if the line cannot start, ValueError if a size is missing or no size.
    """
    if not isinstance(launch, Launch):
        raise ValueError(f"launch must be a labkit.serve.Launch, and is {launch!r}")
    if memory is not None and not (is_number(memory) and 0 < memory < float("inf")):
        raise ValueError(f"memory must be a number of bytes above 0, and is {memory!r}")
    shape = model if isinstance(model, ModelShape) else shape_of(model)
    device = device or ("cpu" if on_cpu() else "cuda")
    if device not in DEFAULTS:
        raise ValueError(f"device must be cpu or cuda, and is {device!r}")
    dtype = "bfloat16" if launch.dtype == "auto" else launch.dtype
    weights = weights or dtype
    bits_of(weights)
    shape = _on_one_device(shape, launch)
    length = launch.max_model_len or shape.max_position
    _check_line(shape, launch, length, device)
    kv_bytes = _kv_bytes(launch, dtype)
    block_size = _block_size(shape, launch, device, kv_bytes)
    parts = _parts(shape, launch, weights, device)
    kv_cache = launch.kv_cache_memory or _left(launch, memory, parts)
    of_tokens, of_states, block_bytes = _blocks(shape, block_size, kv_bytes, launch.prefix_caching is not False)
    needed = of_tokens * -(-length // block_size) + of_states
    blocks = launch.num_blocks or kv_cache // block_bytes
    if blocks < needed:
        raise Inconsistent(
            f"too little KV memory: one request of max_model_len {length:,} needs {needed * block_bytes / GIB:.2f} GiB,"
            f" and {blocks * block_bytes / GIB:.2f} are there:"
            f" {max(0, (blocks - of_states) // of_tokens * block_size):,} tokens would fit"
        )
    return Plan(
        *parts, kv_cache, shape.attention_layers * shape.kv_layer_bytes(kv_bytes), block_size, blocks, length,
        int(blocks / needed * length), blocks / needed,
    )  # fmt: skip


def bits_of(weights: str) -> float:
    """Bits of a weight in this format. ValueError names those that there are."""
    if weights not in WEIGHT_BITS:
        raise ValueError(f"weights must be one of {', '.join(WEIGHT_BITS)}, and is {weights!r}")
    return WEIGHT_BITS[weights]


def weight_bytes(shape: ModelShape, weights: str) -> int:
    """Bytes of the weights: the decoder's linear layers in this format; embeddings, head and norms in at least 16 bits.

    For a model whose parameters are given as one number all count as linear layers.
    """
    bits = bits_of(weights)
    kept = max(bits, 16.0)
    linear = shape.weight_count
    if shape.parameters is None:
        embeddings = shape.vocab_size * shape.hidden_size * (1 if shape.tied_embeddings else 2)
        linear -= embeddings + shape.hidden_size * (2 * shape.num_layers + 1)
    return int((linear * bits + (shape.weight_count - linear) * kept) / 8)


def _on_one_device(shape: ModelShape, launch: Launch) -> ModelShape:
    """The part of a model that one device holds: tensor parallelism divides heads, MLPs and vocabulary, not layers."""
    for names in (("--pipeline-parallel-size", "-pp"), ("--decode-context-parallel-size", "-dcp")):
        if launch.option(*names) not in (None, "1"):
            raise ValueError(f"more: {names[0]} is not planned for")
    asked = launch.option("--tensor-parallel-size", "-tp") or "1"
    devices = whole("--tensor-parallel-size", int(asked) if asked.isdecimal() else asked)
    if devices == 1:
        return shape
    heads, kv_heads = shape.num_heads, shape.num_kv_heads
    if heads % devices:
        raise Inconsistent(f"tensor parallel size {devices} does not divide the model's {heads} attention heads")
    if max(kv_heads, devices) % min(kv_heads, devices):
        raise Inconsistent(
            f"tensor parallel size {devices} and the model's {kv_heads} KV heads: neither divides the other"
        )
    state = shape.state and dataclasses.replace(
        shape.state, num_key_heads=shape.state.num_key_heads // devices,
        num_value_heads=shape.state.num_value_heads // devices,
    )  # fmt: skip
    return dataclasses.replace(
        shape, num_heads=heads // devices, num_kv_heads=max(1, kv_heads // devices), state=state,
        intermediate_size=shape.intermediate_size // devices, vocab_size=shape.vocab_size // devices,
        parameters=shape.parameters and shape.parameters // devices,
    )  # fmt: skip


def _check_line(shape: ModelShape, launch: Launch, length: int, device: str) -> None:
    """What is wrong with the line whatever memory there is."""
    if not length:
        raise ValueError("max_model_len: neither the launch line nor the model's config states one")
    if shape.max_position and length > shape.max_position:
        raise Inconsistent(
            f"max_model_len {length:,} is more than the {shape.max_position:,} positions that the model was made for"
        )
    tokens, sequences = launch.max_num_batched_tokens, launch.max_num_seqs
    if tokens and sequences and tokens < sequences:
        raise Inconsistent(
            f"max_num_batched_tokens {tokens} is less than max_num_seqs {sequences}: a step decodes one each"
        )
    if tokens and tokens < length and "--no-enable-chunked-prefill" in launch.more:
        raise Inconsistent(
            f"without chunked prefill a prompt of max_model_len {length:,} must fit into one step of"
            f" max_num_batched_tokens {tokens:,}"
        )
    multiple = DEFAULTS[device][1]
    if launch.block_size and launch.block_size % multiple:
        raise Inconsistent(
            f"block_size {launch.block_size} is no multiple of {multiple}, which attention on {device} needs"
        )
    if device == "cpu" and shape.head_dim not in CPU_HEAD_DIMS:
        raise Inconsistent(f"attention on the CPU has no kernel for head_dim {shape.head_dim}")
    if device == "cpu" and not (launch.kv_cache_memory or launch.num_blocks):
        raise Inconsistent("on a CPU a share of all memory is asked for unless kv_cache_memory says how much")


def _kv_bytes(launch: Launch, dtype: str) -> int:
    kind = launch.kv_cache_dtype if launch.kv_cache_dtype not in (None, "auto") else dtype
    if kind not in KV_BYTES:
        raise ValueError(f"kv_cache_dtype must be auto or one of {', '.join(KV_BYTES)}, and is {kind!r}")
    return KV_BYTES[kind]


def _block_size(shape: ModelShape, launch: Launch, device: str, kv_bytes: int) -> int:
    default, multiple = DEFAULTS[device]
    asked = launch.block_size or default
    if shape.state is None:
        return asked
    return max(asked, shape.hybrid_block_size(multiple=max(multiple, asked), dtype_bytes=kv_bytes))


def _parts(shape: ModelShape, launch: Launch, weights: str, device: str) -> tuple[int, int, int, int]:
    """Bytes of weights, of a step's largest intermediate results, of graphs and of the context."""
    try:
        fixed = weight_bytes(shape, weights)
    except ValueError:
        if launch.kv_cache_memory is None:
            raise
        fixed = 0  # the KV cache does not hang on it
    if device == "cpu":
        return fixed, 0, 0, 0
    tokens = launch.max_num_batched_tokens or BATCHED_TOKENS
    sequences = launch.max_num_seqs or SEQUENCES
    # In an MLP: the input, its residual, gate and up, their product. At the end: logits in fp32, sorted for sampling.
    activations = tokens * (2 * shape.hidden_size + 3 * shape.intermediate_size) * 2
    activations = max(activations, sequences * shape.vocab_size * 4 * 3)
    eager = launch.eager or launch.cudagraph_mode == "NONE"
    sizes = 0 if eager else len(launch.capture_sizes or default_capture_sizes(sequences))
    modes = 2 if launch.cudagraph_mode in (None, "FULL_AND_PIECEWISE") else 1
    return fixed, activations, sizes * modes * GRAPH_BYTES, CONTEXT_BYTES


def default_capture_sizes(max_num_seqs: int) -> list[int]:
    """The batch sizes that vLLM captures where none are named: 1, 2, 4, then steps of 8, and of 16 from 256 on."""
    largest = min(2 * whole("max_num_seqs", max_num_seqs), 512)
    return [s for s in (1, 2, 4, *range(8, 256, 8), *range(256, largest + 1, 16)) if s <= largest]


def _left(launch: Launch, memory: int | None, parts: tuple[int, int, int, int]) -> int:
    if launch.num_blocks:
        return 0  # the number of blocks is fixed, whatever is left
    if memory is None:
        raise ValueError("memory: the launch line leaves the KV cache what the device has left, so say how much it has")
    used = launch.gpu_memory_utilization or UTILIZATION
    left = int(memory * used) - sum(parts)
    if left <= 0:
        names = ", ".join(
            f"{n} {b / GIB:.1f}" for n, b in zip(("weights", "activations", "graphs", "context"), parts, strict=True)
        )
        raise Inconsistent(
            f"nothing is left for the KV cache: {used:.0%} of {memory / GIB:.1f} GiB are {memory * used / GIB:.1f},"
            f" and {sum(parts) / GIB:.1f} are taken ({names})"
        )
    return left


def _blocks(shape: ModelShape, block_size: int, kv_bytes: int, caching: bool) -> tuple[int, int, int]:
    """Blocks that block_size tokens of a request take, blocks that it takes whatever its length, bytes of a block.

    In a hybrid model layers form groups of equal size, all of which take blocks from one pool; a block is the page of
    one group. A group of recurrent layers keeps one state a request, two where prefixes are cached.
    """
    page = block_size * shape.kv_layer_bytes(kv_bytes)
    recurrent = shape.num_layers - shape.attention_layers
    if not recurrent:
        return 1, 0, page * shape.num_layers
    fewer, more = sorted((shape.attention_layers, recurrent))
    group = more if more < 1.5 * fewer else fewer
    attention_groups, recurrent_groups = -(-shape.attention_layers // group), -(-recurrent // group)
    return attention_groups, recurrent_groups * (2 if caching else 1), page * group
