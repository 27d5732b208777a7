"""Oracles: what the kernels compute, in plain torch, at any precision. Slow, and obviously right."""

from __future__ import annotations

import torch


def gather_kv(cache: torch.Tensor, block_table: torch.Tensor, seq_len: int) -> torch.Tensor:
    """The tokens of one sequence in order, out of a paged cache.

    cache: [num_blocks, block_size, num_kv_heads, head_dim]. block_table: [max_blocks], the sequence's row.
    Gives [seq_len, num_kv_heads, head_dim].
    """
    block_size = cache.shape[1]
    blocks = block_table[: -(-seq_len // block_size)].long()
    return cache[blocks].flatten(0, 1)[:seq_len]


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of one query token per sequence over its blocks, computed in `dtype`, one sequence after another.

    Arguments as in kernels.paged_attention. Gives the output [num_seqs, num_heads, head_dim] and the log-sum-exp
    [num_seqs, num_heads], both of `dtype`. An empty sequence gives zeros and -inf.
    """
    num_seqs, num_heads, head_dim = q.shape
    group = num_heads // k_cache.shape[2]
    scale = head_dim**-0.5 if scale is None else scale
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((num_seqs, num_heads), float("-inf"), dtype=dtype, device=q.device)
    for s, seq_len in enumerate(seq_lens.tolist()):
        if seq_len == 0:
            continue
        k = gather_kv(k_cache, block_table[s], seq_len).to(dtype).repeat_interleave(group, dim=1)
        v = gather_kv(v_cache, block_table[s], seq_len).to(dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("hd,thd->ht", q[s].to(dtype), k) * scale
        lse[s] = scores.logsumexp(dim=1)
        out[s] = torch.einsum("ht,thd->hd", scores.softmax(dim=1), v)
    return out, lse


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slot_mapping: torch.Tensor
) -> None:
    """Write the K and V of new tokens to their slots, in place, one token after another; negative slots are skipped.

    Arguments as in kernels.kv_cache.write_kv.
    """
    block_size = k_cache.shape[1]
    for token, slot in enumerate(slot_mapping.tolist()):
        if slot >= 0:
            k_cache[slot // block_size, slot % block_size] = k[token]
            v_cache[slot // block_size, slot % block_size] = v[token]
