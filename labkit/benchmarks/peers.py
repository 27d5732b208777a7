"""What the paged decode kernel races against, each used as its own project decodes in a CUDA graph."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Inputs:
    """One input set of decode attention; shapes as in kernels.paged_attention. max_len: the largest of seq_lens."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    max_len: int
    uniform: bool

    @property
    def scale(self) -> float:
        return self.q.shape[-1] ** -0.5


Peer = Callable[[Inputs], Callable[[], torch.Tensor]]


def fa3_paged(planned: bool) -> Peer | None:
    """FlashAttention 3 with pages, from vLLM; None where vLLM is not installed or the GPU is no Hopper.

    planned: with scheduler metadata made beforehand and at most 32 splits, as vLLM does under CUDA graphs; the
    metadata is not timed, since a model makes it once for all layers. Otherwise it plans inside each call.
    """
    try:
        from vllm.vllm_flash_attn import flash_attn_varlen_func, get_scheduler_metadata
    except ImportError:
        return None
    if torch.cuda.get_device_capability()[0] != 9:
        return None

    def bind(x: Inputs) -> Callable[[], torch.Tensor]:
        num_seqs, num_heads, head_dim = x.q.shape
        _, block_size, num_kv_heads, _ = x.k_cache.shape
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=x.q.device)
        out = torch.empty_like(x.q)
        plan = {}
        if planned:
            metadata = get_scheduler_metadata(
                batch_size=num_seqs, max_seqlen_q=1, max_seqlen_k=x.max_len, num_heads_q=num_heads,
                num_heads_kv=num_kv_heads, headdim=head_dim, cache_seqlens=x.seq_lens, qkv_dtype=x.q.dtype,
                cu_seqlens_q=starts, page_size=block_size, causal=True, num_splits=32,
            )  # fmt: skip
            plan = {"scheduler_metadata": metadata, "num_splits": 32}
        return functools.partial(
            flash_attn_varlen_func, q=x.q, k=x.k_cache, v=x.v_cache, out=out, max_seqlen_q=1, cu_seqlens_q=starts,
            max_seqlen_k=x.max_len, seqused_k=x.seq_lens, block_table=x.block_table, softmax_scale=x.scale,
            causal=True, fa_version=3, **plan,
        )  # fmt: skip

    return bind


def vllm_triton() -> Peer | None:
    """vLLM's Triton unified attention, with its backend's rule for when to split; None where vLLM is not installed."""
    try:
        from vllm.v1.attention.ops.triton_unified_attention import unified_attention
    except ImportError:
        return None
    segments = 16  # vLLM's NUM_PAR_SOFTMAX_SEGMENTS

    def bind(x: Inputs) -> Callable[[], torch.Tensor]:
        num_seqs, num_heads, head_dim = x.q.shape
        threshold = 128 // x.k_cache.shape[2]  # vLLM's MIN_LAUNCH_GRID_SIZE_2D over the KV heads
        device = x.q.device
        starts = torch.arange(num_seqs + 1, dtype=torch.int32, device=device)
        out = torch.empty_like(x.q)
        partial = functools.partial(
            unified_attention, q=x.q, k=x.k_cache, v=x.v_cache, out=out, cu_seqlens_q=starts, max_seqlen_q=1,
            seqused_k=x.seq_lens, max_seqlen_k=x.max_len, softmax_scale=x.scale, causal=True, window_size=(-1, -1),
            block_table=x.block_table, softcap=0.0, q_descale=None, k_descale=None, v_descale=None,
            seq_threshold_3D=threshold, num_par_softmax_segments=segments,
            softmax_segm_output=torch.empty(threshold, num_heads, segments, head_dim, device=device),
            softmax_segm_max=torch.empty(threshold, num_heads, segments, device=device),
            softmax_segm_expsum=torch.empty(threshold, num_heads, segments, device=device),
        )  # fmt: skip

        def call() -> torch.Tensor:
            partial()
            return out

        return call

    return bind


def sdpa_gather(x: Inputs) -> Callable[[], torch.Tensor]:
    """Gather the blocks into contiguous K and V, then torch's FlashAttention 2; for equal lengths only."""
    max_blocks = -(-x.max_len // x.k_cache.shape[1])
    flat = x.block_table[:, :max_blocks].flatten().long()

    def contiguous(cache: torch.Tensor) -> torch.Tensor:
        tokens = cache[flat].view(x.q.shape[0], max_blocks * cache.shape[1], *cache.shape[2:])
        return tokens[:, : x.max_len].transpose(1, 2)

    def call() -> torch.Tensor:
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            k, v = contiguous(x.k_cache), contiguous(x.v_cache)
            return F.scaled_dot_product_attention(x.q.unsqueeze(2), k, v, enable_gqa=True).squeeze(2)

    return call
