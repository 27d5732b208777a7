"""Attention over the paged cache: our Triton kernels, or plain torch, behind one interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from kernels import reference
from labkit.engine.graphs import as_launch


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass belong; all int32 on the device.

    slot_mapping: [num_tokens], -1 for padding. block_table: [num_seqs, max_blocks]. seq_lens: [num_seqs], this step's
    tokens included, 0 for padding. cu_seqlens_q: [num_seqs + 1], or None when every sequence has one token.
    """

    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None


class Attention(Protocol):
    """Writes the new tokens' K and V, and attends. q: [num_tokens, num_heads, head_dim], k, v: with num_kv_heads."""

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        step: Step,
    ) -> torch.Tensor: ...  # fmt: skip


class TorchAttention:
    """Plain torch. Decoding reads no value on the host, so that it can be captured; prefill is the oracle itself.

    The cache's last block must belong to nobody: padding is written there.
    """

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:  # fmt: skip
        """As in the interface."""
        slots = torch.where(step.slot_mapping < 0, k_cache.shape[0] * k_cache.shape[1] - 1, step.slot_mapping).long()
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)
        if step.cu_seqlens_q is None:
            return self._decode(q, k_cache, v_cache, step)
        tables, lens = step.block_table, step.seq_lens
        return reference.paged_prefill(q, k_cache, v_cache, tables, lens, step.cu_seqlens_q, dtype=q.dtype)[0]

    def _decode(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: Step) -> torch.Tensor:
        num_seqs, num_heads, head_dim = q.shape
        k = k_cache[step.block_table.long()].flatten(1, 2)  # (num_seqs, max_len, num_kv_heads, head_dim)
        v = v_cache[step.block_table.long()].flatten(1, 2)
        seen = torch.arange(k.shape[1], device=q.device) < step.seq_lens[:, None]  # (num_seqs, max_len)
        grouped = q.unflatten(1, (k.shape[2], -1))  # (num_seqs, num_kv_heads, group, head_dim)
        scores = torch.einsum("shgd,sthd->shgt", grouped, k) * head_dim**-0.5
        # The lowest number, not -inf: a padded row sees nothing, and would turn into NaN.
        scores = scores.masked_fill(~seen[:, None, None, :], torch.finfo(scores.dtype).min)
        return torch.einsum("shgt,sthd->shgd", scores.softmax(-1), v).reshape(num_seqs, num_heads, head_dim)


class TritonAttention:
    """The kernels of this project: one workspace for all layers, since they run one after another."""

    def __init__(self, num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device):
        from kernels import flash_attention_paged, kv_cache, paged_attention

        self._write = kv_cache.write_kv
        self._prefill = flash_attention_paged.paged_prefill
        self._decode = paged_attention.paged_attention
        self._workspace: Any = paged_attention.Workspace.allocate(num_heads, num_kv_heads, head_dim, dtype, device)

    def __call__(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor,
        step: Step,
    ) -> torch.Tensor:  # fmt: skip
        """As in the interface."""
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        table, lens, starts = step.block_table, step.seq_lens, step.cu_seqlens_q
        as_launch(lambda: self._write(k, v, k_cache, v_cache, step.slot_mapping))
        if starts is None:
            workspace = self._workspace
            as_launch(lambda: self._decode(q, k_cache, v_cache, table, lens, out=out, workspace=workspace))
        else:
            as_launch(lambda: self._prefill(q, k_cache, v_cache, table, lens, starts, out=out))
        return out
