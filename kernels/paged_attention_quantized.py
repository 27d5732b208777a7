"""Decode attention over a paged KV cache in 8 or 4 bits, which is read as it is and dequantized inside the kernel.

The kernel, its plan of equal chunks and its combining are those of `kernels.paged_attention`.
"""

from __future__ import annotations

import torch

from kernels import paged_attention as unquantized
from kernels.kv_cache_quantized import QuantizedCache, require_kind
from kernels.paged_attention import Plan, Workspace, count_sms
from kernels.validate import require_tensors, require_type


def pairs_per_sm(num_seqs: int, num_kv_heads: int, device: torch.device) -> float:
    """(sequence, KV head) pairs for each SM: below 1, pairs are split, and combining partial results counts."""
    return num_seqs * num_kv_heads / count_sms(device)


def plan_for(head_dim: int, kind: str, pairs: float) -> Plan:
    """The launch that was fastest on an H200 (sm_90). pairs: see `pairs_per_sm`.

    Programs of one warp wait for no other, and many share an SM; where registers are capped, it is so that they fit.
    """
    if head_dim > 128:
        return Plan(block_n=32, num_warps=4, num_stages=3, ctas_per_sm=2)
    if pairs < 0.125:  # long sequences, parted most: their partial results are many, and are combined 16 at a time
        return Plan(64, num_warps=2, num_stages=3, ctas_per_sm=4, combined_elements=8192, max_registers=255)
    block_n = 64 if kind == "int4" else 32
    return Plan(block_n, num_warps=1, num_stages=3, ctas_per_sm=8, combined_elements=4096, max_registers=255)


def allocate_workspace(
    kind: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Workspace:
    """A workspace for `paged_attention_quantized` over caches of this kind; see kernels.paged_attention.Workspace.

    It fits any number of sequences: it is made for the plan with the most chunks.
    """
    plan = max((plan_for(head_dim, kind, pairs) for pairs in (0, 1)), key=lambda plan: plan.ctas_per_sm)
    return Workspace.allocate(num_heads, num_kv_heads, head_dim, dtype, device, plan)


def paged_attention_quantized(
    q: torch.Tensor,
    cache: QuantizedCache,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    out: torch.Tensor | None = None,
    lse: torch.Tensor | None = None,
    workspace: Workspace | None = None,
) -> torch.Tensor:
    """`kernels.paged_attention.paged_attention` over a quantized cache, with the same arguments, errors and promises.

    cache: written by kernels.kv_cache_quantized.write_kv_quantized. workspace: from `allocate_workspace`.
    """
    require_type(isinstance(cache, QuantizedCache), f"cache: expected a QuantizedCache, got {type(cache).__name__}")
    require_tensors(q=q, cache=cache.k, block_table=block_table, seq_lens=seq_lens)
    require_kind(cache.kind, cache.k.device)
    unquantized.require_queries(q, cache.k.shape[2], block_table, seq_lens, out, lse)
    if q.shape[2] != cache.head_dim:
        raise ValueError(f"q: expected a head_dim of {cache.head_dim} like the cache's, got {q.shape[2]}")
    plan = plan_for(cache.head_dim, cache.kind, pairs_per_sm(q.shape[0], cache.k.shape[2], q.device))
    return unquantized.launch(
        q, cache.k, cache.v, block_table, seq_lens, scale, out, lse, workspace, plan, cache
    )  # fmt: skip
