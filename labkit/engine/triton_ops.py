"""The operations of labkit.engine.ops by the kernels of this project; in the interpreter where there is no GPU.

Which is fused by whom: everything between matrix products is one kernel each of kernels.fused, products of few rows
are kernels.skinny_matmul (silu(gate) * up inside), products of many rows are cuBLAS's. Nothing goes through
torch.compile.
"""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F

from kernels import flash_attention_paged, fused, int4_parts, paged_attention
from kernels.int4_matmul import int4_matmul
from kernels.int4_repack import Int4Weight
from kernels.skinny_matmul import faster_than_cublas, skinny_matmul
from labkit.engine.config import ModelConfig
from labkit.engine.graphs import as_launch
from labkit.engine.ops import Step, TorchOps
from labkit.engine.weights import LayerWeights


class TritonOps(TorchOps):
    """One workspace of the decode attention for all layers, since they run one after another."""

    def __init__(self, config: ModelConfig, rope_table: torch.Tensor):
        super().__init__(config, rope_table)
        self._workspace = paged_attention.Workspace.allocate(
            config.num_heads, config.num_kv_heads, config.head_dim, rope_table.dtype, rope_table.device
        )

    def embed(self, tokens: torch.Tensor, sampled: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
        """One launch."""
        return as_launch(lambda: fused.embed(tokens, sampled, table))

    def norm(
        self, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One launch."""
        return as_launch(lambda: fused.add_rms_norm(x, residual, weight, self.config.rms_norm_eps))

    @functools.cached_property
    def _int4_workspace(self) -> int4_parts.Workspace:
        return int4_parts.Workspace.allocate(self.rope.device)

    def linear(self, x: torch.Tensor, weight: torch.Tensor | Int4Weight) -> torch.Tensor:
        """One launch, in parts if it is skinny."""
        if isinstance(weight, Int4Weight):
            return as_launch(lambda: int4_matmul(x, weight, workspace=self._int4_workspace))
        if not faster_than_cublas(len(x), *weight.shape):
            return F.linear(x, weight)
        return as_launch(lambda: skinny_matmul(x, weight))

    def gated(self, x: torch.Tensor, weight: torch.Tensor | Int4Weight) -> torch.Tensor:
        """One launch if it is skinny, else two."""
        if isinstance(weight, Int4Weight):
            product = self.linear(x, weight)
            return as_launch(lambda: fused.silu_mul(product, x.dtype))
        if not faster_than_cublas(len(x), weight.shape[0] // 2, weight.shape[1], gated=True):
            product = F.linear(x, weight)
            return as_launch(lambda: fused.silu_mul(product, x.dtype))
        return as_launch(lambda: skinny_matmul(x, weight, gated=True))

    def attend(self, qkv: torch.Tensor, layer: LayerWeights, cache: torch.Tensor, step: Step) -> torch.Tensor:
        """Two launches: rope with all that belongs to it, and attention."""
        k_cache, v_cache = cache.unbind(0)
        table, lens, starts = step.block_table, step.seq_lens, step.cu_seqlens_q
        where = self.rope, step.positions, step.slot_mapping, self.config.num_heads
        norms, eps = (layer.q_norm, layer.k_norm), self.config.rms_norm_eps
        q = as_launch(
            lambda: fused.rope_write(qkv, k_cache, v_cache, *where, q_norm=norms[0], k_norm=norms[1], eps=eps)
        )
        if starts is None:
            workspace = self._workspace
            out = as_launch(
                lambda: paged_attention.paged_attention(
                    q, k_cache, v_cache, table, lens, workspace=workspace, early=True
                )
            )
        else:
            out = as_launch(lambda: flash_attention_paged.paged_prefill(q, k_cache, v_cache, table, lens, starts))
        return out.flatten(1)

    def logits(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """One launch."""
        if not faster_than_cublas(len(x), *weight.shape):
            return F.linear(x, weight)
        return as_launch(lambda: skinny_matmul(x, weight, whole=True))

    def choose(self, logits: torch.Tensor, sampled: torch.Tensor) -> None:
        """Two launches: the best of each block, and the best of those."""
        as_launch(lambda: fused.argmax(logits, sampled[: len(logits)]), count=2)
