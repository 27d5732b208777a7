"""A representative call of each kernel in `kernels/`: what `labkit inspect` compiles.

Add one here with a new kernel. Only shapes, dtypes and strides matter: nothing is run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from labkit.meter import Call


@dataclass(frozen=True)
class Example:
    """name: "module.function" in `kernels`. case: the shapes, in words. call: makes the Python call.
    archs: those that the kernel is for, all if empty.
    """

    name: str
    case: str
    call: Callable[[], Call]
    archs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """The module in `kernels`."""
        return self.name.partition(".")[0]


def _paged_attention() -> Call:
    from kernels.paged_attention import paged_attention

    q = torch.empty(16, 32, 128, dtype=torch.bfloat16)
    cache = torch.empty(512, 16, 8, 128, dtype=torch.bfloat16)
    table = torch.zeros(16, 256, dtype=torch.int32)
    return Call(paged_attention, (q, cache, cache, table, torch.full((16,), 4096, dtype=torch.int32)))


def _write_kv() -> Call:
    from kernels.kv_cache import write_kv

    new = torch.empty(16, 8, 128, dtype=torch.bfloat16)
    cache = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16)
    return Call(write_kv, (new, new, cache, cache, torch.zeros(16, dtype=torch.int64)))


def _flash_attention() -> Call:
    from kernels.flash_attention import flash_attention

    q = torch.empty(1, 2048, 32, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 2048, 8, 128, dtype=torch.bfloat16)
    return Call(flash_attention, (q, k, k), {"causal": True, "variant": "tl"})


def _paged_prefill() -> Call:
    from kernels.flash_attention_paged import paged_prefill

    q = torch.empty(2048, 32, 128, dtype=torch.bfloat16)
    cache = torch.empty(512, 16, 8, 128, dtype=torch.bfloat16)
    lens, ends = torch.full((4,), 2048, dtype=torch.int32), torch.arange(0, 2049, 512, dtype=torch.int32)
    return Call(paged_prefill, (q, cache, cache, torch.zeros(4, 128, dtype=torch.int32), lens, ends))


def _paged_prefill_hopper() -> Call:
    from kernels.flash_attention_paged_hopper import launch

    q, *rest = _paged_prefill().args
    return Call(launch, (q, *rest, torch.empty_like(q), None, 128**-0.5))


def _flash_attention_hopper() -> Call:
    from kernels.flash_attention_hopper import launch

    q = torch.empty(1, 2048, 32, 128, dtype=torch.bfloat16)
    k = torch.empty(1, 2048, 8, 128, dtype=torch.bfloat16)
    return Call(launch, (q, k, k, torch.empty_like(q), None, True, 128**-0.5))


def _skinny_matmul() -> Call:
    from kernels.skinny_matmul import skinny_matmul

    x, w = torch.empty(1, 4096, dtype=torch.bfloat16), torch.empty(6144, 4096, dtype=torch.bfloat16)
    return Call(skinny_matmul, (x, w))


def _skinny_matmul_gated() -> Call:
    from kernels.skinny_matmul import skinny_matmul

    x, w = torch.empty(16, 4096, dtype=torch.bfloat16), torch.empty(24576, 4096, dtype=torch.bfloat16)
    return Call(skinny_matmul, (x, w), {"gated": True})


def _embed() -> Call:
    from kernels.fused import embed

    index = torch.zeros(16, dtype=torch.int32)
    return Call(embed, (index, index, torch.empty(1024, 4096, dtype=torch.bfloat16)))


def _add_rms_norm() -> Call:
    from kernels.fused import add_rms_norm

    x, residual = torch.empty(4, 16, 4096), torch.empty(16, 4096, dtype=torch.bfloat16)
    return Call(add_rms_norm, (x, residual, residual[0], 1e-6))


def _rope_write() -> Call:
    from kernels.fused import rope_write

    cache = torch.empty(64, 16, 8, 128, dtype=torch.bfloat16)
    index, norm = torch.zeros(16, dtype=torch.int32), torch.empty(128, dtype=torch.bfloat16)
    args = torch.empty(4, 16, 6144), cache, cache, torch.empty(2, 4096, 128, dtype=torch.bfloat16), index, index, 32
    return Call(rope_write, args, {"q_norm": norm, "k_norm": norm})


def _silu_mul() -> Call:
    from kernels.fused import silu_mul

    return Call(silu_mul, (torch.empty(128, 24576, dtype=torch.bfloat16), torch.bfloat16))


def _argmax() -> Call:
    from kernels.fused import argmax

    return Call(argmax, (torch.empty(16, 151936, dtype=torch.bfloat16), torch.zeros(16, dtype=torch.int32)))


def _int4_weight() -> Any:
    from kernels.int4_repack import Int4Weight

    words = torch.empty(64, 256, 128, dtype=torch.int32)
    return Int4Weight(words, torch.empty(32, 2, 2048, dtype=torch.int32), 4096, 4096, 128, torch.bfloat16)


def _int4_matmul() -> Call:
    from kernels.int4_matmul import int4_matmul

    x = torch.empty(16, 4096, dtype=torch.bfloat16)
    return Call(int4_matmul, (x, _int4_weight()), {"variant": "tl"})


def _int4_dequantized() -> Call:
    from kernels.int4_matmul import dequantized

    return Call(dequantized, (_int4_weight(),))


def _int4_hopper() -> Call:
    from kernels.int4_hopper import launch

    x = torch.empty(16, 4096, dtype=torch.bfloat16)
    return Call(launch, (x, _int4_weight(), x))


def _write_kv_quantized() -> Call:
    from kernels.kv_cache_quantized import QuantizedCache, write_kv_quantized

    new = torch.empty(16, 8, 128, dtype=torch.bfloat16)
    cache = QuantizedCache.allocate("int4", 64, 16, 8, 128, "cpu")
    return Call(write_kv_quantized, (new, new, cache, torch.zeros(16, dtype=torch.int64)))


def _paged_attention_quantized() -> Call:
    from kernels.kv_cache_quantized import QuantizedCache
    from kernels.paged_attention_quantized import paged_attention_quantized

    q = torch.empty(16, 32, 128, dtype=torch.bfloat16)
    cache = QuantizedCache.allocate("int4", 64, 16, 8, 128, "cpu")
    lens = torch.full((16,), 4096, dtype=torch.int32)
    return Call(paged_attention_quantized, (q, cache, torch.zeros(16, 256, dtype=torch.int32), lens))


HEADS = "32 query and 8 KV heads of 128, bf16"
EXAMPLES = (
    Example(
        "paged_attention.paged_attention", f"16 sequences of 4,096 tokens, {HEADS}, block size 16", _paged_attention
    ),
    Example("kv_cache.write_kv", "16 tokens, 8 KV heads of 128, bf16, block size 16", _write_kv),
    Example("flash_attention.flash_attention", f"2,048 tokens, causal, {HEADS}", _flash_attention),
    Example("flash_attention_paged.paged_prefill", f"4 chunks of 512 after 1,536 tokens, {HEADS}", _paged_prefill),
    Example(
        "flash_attention_hopper.launch", f"2,048 tokens, causal, {HEADS}", _flash_attention_hopper, archs=("sm_90",)
    ),
    Example(
        "flash_attention_paged_hopper.launch",
        f"4 chunks of 512 after 1,536 tokens, {HEADS}",
        _paged_prefill_hopper,
        archs=("sm_90",),
    ),
    Example("skinny_matmul.skinny_matmul", "1 token, 4,096 to 6,144, bf16", _skinny_matmul),
    Example("skinny_matmul.skinny_matmul", "16 tokens, 4,096 to 2 x 12,288, gated, bf16", _skinny_matmul_gated),
    Example("fused.embed", "16 tokens of 4,096, bf16", _embed),
    Example("fused.add_rms_norm", "16 rows of 4,096 in 4 parts, bf16", _add_rms_norm),
    Example("fused.rope_write", f"16 tokens, {HEADS}, in 4 parts, block size 16", _rope_write),
    Example("fused.silu_mul", "128 rows of 2 x 12,288, bf16", _silu_mul),
    Example("fused.argmax", "16 rows of 151,936, bf16", _argmax),
    Example("kv_cache_quantized.write_kv_quantized", "16 tokens, 8 KV heads of 128, to int4", _write_kv_quantized),
    Example(
        "paged_attention_quantized.paged_attention_quantized",
        f"16 sequences of 4,096 tokens, {HEADS}, int4 cache",
        _paged_attention_quantized,
    ),
    Example("int4_matmul.int4_matmul", "16 tokens, 4,096 by 4,096, groups of 128, bf16", _int4_matmul),
    Example("int4_matmul.dequantized", "4,096 by 4,096, groups of 128, to bf16", _int4_dequantized),
    Example("int4_hopper.launch", "16 tokens, 4,096 by 4,096, groups of 128, bf16", _int4_hopper, archs=("sm_90",)),
)


def examples_of(name: str) -> tuple[Example, ...]:
    """The examples of a module of `kernels`, or the one of "module.function". ValueError names those that there are."""
    found = tuple(e for e in EXAMPLES if name in (e.module, e.name))
    if not found:
        modules = dict.fromkeys(e.module for e in EXAMPLES)
        functions = dict.fromkeys(e.name for e in EXAMPLES)  # one has two examples
        raise ValueError(f"no kernel {name!r}; there are: {', '.join(modules)}, and {', '.join(functions)}")
    return found
