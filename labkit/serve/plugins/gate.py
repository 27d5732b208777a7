"""Whether an attention function computes attention, proved before a server relies on it.

Random queries and a random, scattered cache of the model's own shape, once as a batch of decode steps and once with
chunks of prompts among them, on a GPU once more with long ones; beside them the oracle in `kernels.reference`, at a
higher precision.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from kernels import reference
from labkit.checks import compare
from labkit.checks.contract import Failed

LENGTHS = (1, 17, 33, 50)  # tokens of the sequences: shorter than a block, and across several
CHUNKS = (1, 17, 9, 1)  # new tokens of each in the mixed batch: a whole prompt, a part of one, decode steps
LONG = (1, 600, 700, 50)  # chunks, and the sequences as well: too many tokens for attention.is_light


@dataclass(frozen=True)
class Shape:
    """The shape of a layer's attention. block_size: tokens in a block of the cache. dtype: of queries and cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype


@functools.cache
def fault_of(function: Callable[..., torch.Tensor], shape: Shape, device: torch.device) -> str:
    """What is wrong with an attention function for layers of this shape, in one sentence, or "" if nothing is.

    function: see `attention.Attention`; an exception of its own counts as wrong.
    """
    batches = [
        ("decode steps", (1,) * len(LENGTHS), LENGTHS),
        ("chunks of prompts among decode steps", CHUNKS, LENGTHS),
    ]
    if device.type == "cuda":  # an interpreter would take minutes for it, and has no kernels to choose from
        batches.append(("long prompts", LONG, LONG))
    for name, chunks, lengths in batches:
        arguments = _inputs(shape, chunks, lengths, device)
        q, *cache = arguments
        oracle, peer = (
            reference.paged_prefill(q.to(dtype), *cache, scale=shape.head_dim**-0.5, dtype=dtype)[0]
            for dtype in (torch.float64, shape.dtype)
        )
        try:
            got = function(*arguments, shape.head_dim**-0.5)
            compare.close(got, oracle, peer.to(shape.dtype), "o")
        except Failed as failure:
            return f"{name}: {failure}"
        except Exception as error:
            return f"{name}: {type(error).__name__}: {error}"
    return ""


def _inputs(
    shape: Shape, chunks: tuple[int, ...], seq_lens: tuple[int, ...], device: torch.device
) -> tuple[torch.Tensor, ...]:
    """q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q; the cache in the layout that vLLM gives."""
    random = torch.Generator().manual_seed(0)
    blocks = [-(-length // shape.block_size) for length in seq_lens]
    size = (sum(blocks) + 1, shape.num_kv_heads, shape.block_size, 2 * shape.head_dim)
    kv_cache = torch.randn(size, generator=random).to(shape.dtype)
    scattered = (torch.randperm(sum(blocks), generator=random) + 1).to(torch.int32)
    table = torch.zeros(len(seq_lens), max(blocks), dtype=torch.int32)
    for row, mine in zip(table, scattered.split(blocks), strict=True):
        row[: len(mine)] = mine
    q = torch.randn(sum(chunks), shape.num_heads, shape.head_dim, generator=random).to(shape.dtype)
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    k_cache, v_cache = kv_cache.to(device).transpose(1, 2).chunk(2, dim=-1)
    lengths = torch.tensor(seq_lens, dtype=torch.int32)
    return (q.to(device), k_cache, v_cache, *(x.to(device) for x in (table, lengths, starts)))
