"""Decode attention over a paged KV cache in 8 or 4 bits, which is read as it is and dequantized inside the kernel.

The kernel, its plan of equal chunks and its combining are those of `kernels.paged_attention`.
"""

from __future__ import annotations

import torch

from kernels import paged_attention as unquantized
from kernels.kv_cache_quantized import QuantizedCache, require_kind
from kernels.paged_attention import Plan, Workspace
from kernels.validate import require_tensors, require_type


def plan_for(head_dim: int, kind: str) -> Plan:
    """The launch that suits an H200 (sm_90): programs of one warp wait for no other, and many share an SM.

    Registers are capped so that that many fit; the loop itself spills next to nothing.
    """
    if head_dim > 128:
        return Plan(block_n=32, num_warps=4, num_stages=3, ctas_per_sm=2)
    if kind == "int4":
        return Plan(64, num_warps=1, num_stages=3, ctas_per_sm=10, combined_elements=2048, max_registers=200)
    return Plan(32, num_warps=1, num_stages=3, ctas_per_sm=11, combined_elements=2048, max_registers=184)


def allocate_workspace(
    kind: str, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device | str
) -> Workspace:
    """A workspace for `paged_attention_quantized` over caches of this kind; see kernels.paged_attention.Workspace."""
    return Workspace.allocate(num_heads, num_kv_heads, head_dim, dtype, device, plan_for(head_dim, kind))


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
    return unquantized.launch(
        q, cache.k, cache.v, block_table, seq_lens, scale, out, lse, workspace, plan_for(cache.head_dim, cache.kind),
        cache,
    )  # fmt: skip
