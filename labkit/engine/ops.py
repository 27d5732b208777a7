"""What a decoder is made of, in plain torch; labkit.engine.triton_ops has the same by the kernels of this project.

Numbers follow transformers step by step, so that greedy tokens are the same; the kernels round once where torch rounds
after each operation. Both can be captured in a graph when every sequence has one token.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kernels import reference
from labkit.engine.config import ModelConfig
from labkit.engine.weights import LayerWeights


@dataclass(frozen=True)
class Step:
    """Where the tokens of one forward pass belong; all int32 on the device.

    positions, slot_mapping: [num_tokens], a slot of -1 for padding. block_table: [num_seqs, max_blocks]. seq_lens:
    [num_seqs], this step's tokens included, 0 for padding. cu_seqlens_q: [num_seqs + 1], or None when every sequence
    has one token.
    """

    positions: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    cu_seqlens_q: torch.Tensor | None = None


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, the quotient in float32."""
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate the halves of each head. x: [rows, heads, head_dim]. cos, sin: [rows, head_dim]."""
    low, high = x.chunk(2, -1)
    return x * cos[:, None, :] + torch.cat((-high, low), -1) * sin[:, None, :]


class TorchOps:
    """Decoding reads no value on the host, so that it can be captured; prefill is the oracle itself.

    The cache's last block must belong to nobody: padding is written there. rope_table: [2, positions, head_dim] of the
    model's dtype, on its device. What `linear` gives only `norm` and `attend` may read: it need not be summed up yet.
    """

    def __init__(self, config: ModelConfig, rope_table: torch.Tensor):
        self.config, self.rope = config, rope_table

    def embed(self, tokens: torch.Tensor, sampled: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """[rows, hidden] by token; -1 - i stands for sampled[i]."""
        known = torch.where(tokens < 0, sampled[(-1 - tokens).clamp_min(0).long()], tokens)
        return F.embedding(known, table)

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The sum of both, normalised, and the sum; [rows, hidden] each."""
        total = x if residual is None else x + residual
        return rms_norm(total, weight, self.config.rms_norm_eps), total

    def linear(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """x @ weight.T."""
        return F.linear(x, weight)

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """[rows, vocab_size], summed up."""
        return F.linear(x, weight)

    def gated(self, x: torch.Tensor, weight: Any) -> torch.Tensor:
        """silu(x @ gate.T) * (x @ up.T), gate and up joined in `weight`."""
        gate, up = F.linear(x, weight).chunk(2, -1)
        return F.silu(gate) * up

    def attend(self, qkv: torch.Tensor, layer: LayerWeights, cache: torch.Tensor, step: Step) -> torch.Tensor:
        """Norms and rope of the joined q, k and v, the write to the cache, attention. [rows, num_heads * head_dim]."""
        heads, kv_heads, dim = self.config.num_heads, self.config.num_kv_heads, self.config.head_dim
        q, k, v = qkv.unflatten(-1, (-1, dim)).split((heads, kv_heads, kv_heads), 1)
        if layer.q_norm is not None and layer.k_norm is not None:
            q, k = (rms_norm(x, w, self.config.rms_norm_eps) for x, w in ((q, layer.q_norm), (k, layer.k_norm)))
        cos, sin = self.rope[:, step.positions.long()]
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        k_cache, v_cache = cache.unbind(0)
        slots = torch.where(step.slot_mapping < 0, k_cache.shape[0] * k_cache.shape[1] - 1, step.slot_mapping).long()
        k_cache.flatten(0, 1).index_copy_(0, slots, k)
        v_cache.flatten(0, 1).index_copy_(0, slots, v)
        if step.cu_seqlens_q is None:
            return self._decode(q, k_cache, v_cache, step).flatten(1)
        table, lens = step.block_table, step.seq_lens
        return reference.paged_prefill(q, k_cache, v_cache, table, lens, step.cu_seqlens_q, dtype=q.dtype)[0].flatten(1)

    def _decode(self, q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, step: Step) -> torch.Tensor:
        k = k_cache[step.block_table.long()].flatten(1, 2)  # (num_seqs, max_len, num_kv_heads, head_dim)
        v = v_cache[step.block_table.long()].flatten(1, 2)
        seen = torch.arange(k.shape[1], device=q.device) < step.seq_lens[:, None]  # (num_seqs, max_len)
        grouped = q.unflatten(1, (k.shape[2], -1))  # (num_seqs, num_kv_heads, group, head_dim)
        scores = torch.einsum("shgd,sthd->shgt", grouped, k) * q.shape[-1] ** -0.5
        # The lowest number, not -inf: a padded row sees nothing, and would turn into NaN.
        scores = scores.masked_fill(~seen[:, None, None, :], torch.finfo(scores.dtype).min)
        return torch.einsum("shgt,sthd->shgd", scores.softmax(-1), v).reshape(q.shape)

    def choose(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """The first of each row's largest logits, into the first rows of `sampled`."""
        sampled[: len(logits)].copy_(logits.argmax(-1))
