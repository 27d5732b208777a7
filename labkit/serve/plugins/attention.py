"""An attention backend of vLLM that runs a function of ours: by default the Triton kernels in `kernels`.

On CUDA the backend is vLLM's Triton backend with another `forward`: its metadata builder, its cache layout and its
write of K and V stay, so decode steps are captured in CUDA graphs as with the stock one. vLLM calls it CUSTOM. On a CPU
vLLM has one slot for attention and ignores CUSTOM, so that slot is taken; its own kernel stores K and V in another
order inside a block, so the write is ours as well. Triton kernels run there in Triton's interpreter.

Before an engine's first step, and so before a graph is captured, the function is proved on random inputs of the model's
shape (`gate.fault_of`). One that fails is not used: the stock backend stays, and a warning says why.
"""

from __future__ import annotations

import functools
import importlib
import os
from collections.abc import Callable
from typing import Any

import torch

from kernels import flash_attention_paged
from kernels.flash_attention_paged import paged_prefill
from kernels.paged_attention import Workspace, paged_attention
from labkit.serve import plugins
from labkit.serve.plugins import gate

Attention = Callable[..., torch.Tensor]
"""f(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale) -> [num_tokens, num_heads, head_dim], shapes as in
kernels.flash_attention_paged: decode steps and chunks of prompts may be in one batch."""

_workspaces: dict[tuple, Workspace] = {}
_injected: Attention | None = None
CUDA_BACKEND = "labkit.serve.plugins.attention_cuda.LabBackend"
CPU_BACKEND = "labkit.serve.plugins.attention_cpu.LabBackend"


def register() -> None:
    """Put our backend where vLLM looks: CUSTOM on CUDA, the one slot on a CPU."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend

    if current_platform.is_cpu():
        register_backend(AttentionBackendEnum.CPU_ATTN, CPU_BACKEND)
    else:
        register_backend(AttentionBackendEnum.CUSTOM, CUDA_BACKEND)


def inject(function: Attention | None) -> None:
    """Use this function in the engines that start in this process from now on; None for vLLM's own attention again.

    For a notebook, with VLLM_ENABLE_V1_MULTIPROCESSING=0. A server's processes get theirs through LABKIT_ATTENTION.
    """
    global _injected
    from vllm.v1.attention import selector
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    selector._cached_get_attn_backend.cache_clear()  # an engine before this one may have looked its backend up
    _injected = function
    if function is not None:
        register()
        return
    for slot in (AttentionBackendEnum.CPU_ATTN, AttentionBackendEnum.CUSTOM):
        slot.clear_override()


def chosen() -> Attention:
    """The function to run: the injected one, else what LABKIT_ATTENTION names, `kernels` or `module:function`."""
    if _injected is not None:
        return _injected
    name = os.environ.get(plugins.ATTENTION, "kernels")
    if name == "kernels":
        return kernels_attention
    module, colon, function = name.partition(":")
    if not colon:
        raise ValueError(f"{plugins.ATTENTION}: expected kernels or module:function, and got {name!r}")
    return getattr(importlib.import_module(module), function)


def kernels_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, block_table: torch.Tensor, seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor, scale: float, out: torch.Tensor | None = None, decode: bool = False,
    light: bool = False,
) -> torch.Tensor:  # fmt: skip
    """`kernels.paged_attention` for a batch of decode steps, `kernels.flash_attention_paged` for all others.

    Arguments as in `Attention`. out: written and returned, if given. decode: whether every sequence has one query,
    which is known on the host; read from the device, it would break a graph's capture. light: see `is_light`; the
    portable kernel then runs unchecked, on shapes that `gate` has proved, and out may have unused rows.
    """
    if light:
        out = torch.empty_like(q) if out is None else out
        flash_attention_paged.launch(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, out, None, scale)
        return out
    if decode and q.shape[0] == seq_lens.shape[0]:
        workspace = workspace_for(q.shape[1], k_cache.shape[2], q.shape[2], q.dtype, q.device)
        return paged_attention(q, k_cache, v_cache, block_table, seq_lens, scale=scale, out=out, workspace=workspace)
    return paged_prefill(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale=scale, out=out)


def workspace_for(
    num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> Workspace:
    """One workspace for all layers of a shape. Made at the latest by `install`: memory that is allocated while a graph
    is captured belongs to that graph, and another one's replay would find it overwritten."""
    key = (num_heads, num_kv_heads, head_dim, dtype, device)
    if key not in _workspaces:
        _workspaces[key] = Workspace.allocate(num_heads, num_kv_heads, head_dim, dtype, device)
    return _workspaces[key]


def run(function: Attention, impl: Any, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, out: torch.Tensor):
    """Attention of one layer in one step, written to `out`: query and out [num_tokens, num_heads, head_dim].

    kv_cache: [num_blocks, num_kv_heads, block_size, 2 * head_dim], K and V side by side, in any memory order.

    A step with prompts runs layer by layer between pieces of graphs, and if it is light, at the pace of the host: there
    nothing is checked and nothing is cut.
    """
    tokens, table, seq_lens = metadata.num_actual_tokens, metadata.block_table, metadata.seq_lens
    k_cache, v_cache = views(impl, kv_cache)
    if table.shape[0] > seq_lens.shape[0]:  # rows for padding that this step does not have
        table = table[: seq_lens.shape[0]]
    starts, decode = metadata.query_start_loc, metadata.max_query_len == 1
    if function is kernels_attention and not decode and is_light(tokens, metadata.max_seq_len):
        return kernels_attention(
            query, k_cache, v_cache, table, seq_lens, starts, impl.scale, out=out, light=True
        )  # fmt: skip
    arguments = (query[:tokens], k_cache, v_cache, table, seq_lens, starts, impl.scale)
    if function is kernels_attention:
        kernels_attention(*arguments, out=out[:tokens], decode=decode)
    else:
        out[:tokens] = function(*arguments)
    return out


def is_light(tokens: int, longest: int) -> bool:
    """Whether launching a step of so many tokens, over sequences of at most `longest`, is longer than computing it.

    On an H200 the kernel for Hopper took the host 160 us to launch, 130 us more than the portable one; it makes up for
    them from about 2**23 pairs of query and key on (heads of Qwen3-8B), and in long steps nobody waits for the host.
    """
    return tokens < 1024 and tokens * longest < 2**23


class Served:
    """What our layers have in common, before vLLM's own class in the order of inheritance.

    attention: the function that is proved for this layer; None where vLLM's own stays. fault: why.
    """

    attention: Attention | None = None
    fault: str = ""
    kv_cache: torch.Tensor | None = None
    halves: tuple[torch.Tensor, torch.Tensor]

    def forward(
        self, layer: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor,
        attn_metadata: Any, output: torch.Tensor, *args: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        """See `run`; attn_metadata is None while the engine warms up, or measures its memory."""
        if self.attention is None or attn_metadata is None:
            stock: Any = super()
            return stock.forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
        return run(self.attention, self, query, kv_cache, attn_metadata, output)


def views(impl: Any, kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`halves` of a layer's cache, which is the same tensor in each step."""
    if impl.kv_cache is not kv_cache:
        impl.kv_cache, impl.halves = kv_cache, halves(kv_cache)
    return impl.halves


def halves(kv_cache: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Views of K and V, each [num_blocks, block_size, num_kv_heads, head_dim]."""
    k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    return k_cache, v_cache


def unsupported(impl: Any) -> str:
    """Why this layer is none for our kernels, or "": they know causal attention over a plain cache, nothing more."""
    features = {
        "alibi": getattr(impl, "alibi_slopes", None) is not None,
        "a sliding window": getattr(impl, "sliding_window", None) not in (None, -1, (-1, -1)),
        "a soft cap": bool(getattr(impl, "logits_soft_cap", None)),
        "attention sinks": getattr(impl, "sinks", None) is not None,
        "a quantised KV cache": getattr(impl, "kv_cache_dtype", "auto") not in ("auto", "bfloat16", "float16"),
        f"attention of type {impl.attn_type}": impl.attn_type != "decoder",
        "a KV cache shared between layers": getattr(impl, "kv_sharing_target_layer_name", None) is not None,
    }
    return next((f"this layer has {name}" for name, has in features.items() if has), "")


def install(builder: Any, layer_names: list[str]) -> None:
    """Give the layers of a metadata builder their function, once it is proved for their shape.

    Layers that it does not fit keep vLLM's own attention (`impl.attention` is None), with a warning that says why.
    """
    from vllm.logger import init_logger

    spec, device = builder.kv_cache_spec, torch.device(builder.device)
    for name in layer_names:
        impl = builder.vllm_config.compilation_config.static_forward_context[name].impl
        shape = gate.Shape(impl.num_heads, spec.num_kv_heads, spec.head_size, spec.block_size, spec.dtype)
        workspace_for(shape.num_heads, shape.num_kv_heads, shape.head_dim, shape.dtype, device)
        fault = unsupported(impl) or gate.fault_of(_as_served(chosen()), shape, device)
        impl.attention, impl.fault = None if fault else chosen(), fault
        if fault:
            init_logger("vllm.labkit").warning("labkit's attention is not used in %s: %s", name, fault)


@functools.cache
def _as_served(function: Attention) -> Attention:
    """The function as a step calls it: ours is told what is a decode step, which a tensor does not say."""
    if function is not kernels_attention:
        return function

    def served(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *others: Any) -> torch.Tensor:
        table, seq_lens, starts, scale = others
        decode = q.shape[0] == seq_lens.shape[0]
        light = not decode and is_light(q.shape[0], table.shape[1] * k_cache.shape[1])
        return kernels_attention(q, k_cache, v_cache, table, seq_lens, starts, scale, decode=decode, light=light)

    return served
