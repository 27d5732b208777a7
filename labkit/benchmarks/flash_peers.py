"""What the FlashAttention kernels race against; each gets its inputs in the layout it likes best."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel


@dataclass(frozen=True)
class Inputs:
    """One input set. Shapes as in kernels.flash_attention: four dimensions, or packed with cu_seqlens.

    max_q, max_k: the longest sequence's queries and keys.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    causal: bool
    max_q: int
    max_k: int
    cu_q: torch.Tensor | None = None
    cu_k: torch.Tensor | None = None


@dataclass(frozen=True)
class Pages:
    """A paged cache of keys and values; shapes as in kernels.paged_attention."""

    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor


Call = Callable[[], torch.Tensor]
Peer = Callable[[Inputs], Call]


def sdpa(backend: SDPBackend) -> Peer:
    """torch's scaled_dot_product_attention with this backend alone, heads before tokens in memory."""

    def bind(x: Inputs) -> Call:
        q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))

        def call() -> torch.Tensor:
            with sdpa_kernel(backend):
                o = F.scaled_dot_product_attention(q, k, v, is_causal=x.causal, enable_gqa=q.shape[1] != k.shape[1])
            return o.transpose(1, 2)

        return call

    return bind


def flex(x: Inputs) -> Call:
    """FlexAttention's compiled kernel, with a block mask when causal."""
    from torch.nn.attention.flex_attention import create_block_mask

    def below(b: torch.Tensor, h: torch.Tensor, i: torch.Tensor, j: torch.Tensor) -> torch.Tensor:
        return i >= j

    q, k, v = (t.transpose(1, 2).contiguous() for t in (x.q, x.k, x.v))
    mask = create_block_mask(below, None, None, x.max_q, x.max_k, device=x.q.device) if x.causal else None
    compiled = _compiled_flex()
    return lambda: compiled(q, k, v, block_mask=mask).transpose(1, 2)


@functools.cache
def _compiled_flex() -> Callable[..., torch.Tensor]:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def fa3(x: Inputs) -> Call:
    """FlashAttention 3 for packed sequences, from vLLM; a batch of equal lengths is passed packed.

    Raises ImportError where vLLM is not installed.
    """
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v = x.q, x.k, x.v
    cu_q, cu_k = x.cu_q, x.cu_k
    if cu_q is None:
        batch = q.shape[0]
        cu_q = torch.arange(0, batch + 1, dtype=torch.int32, device=q.device) * x.max_q
        cu_k = torch.arange(0, batch + 1, dtype=torch.int32, device=q.device) * x.max_k
        q, k, v = (t.flatten(0, 1) for t in (q, k, v))
    out = torch.empty_like(q)
    call = functools.partial(
        flash_attn_varlen_func, q=q, k=k, v=v, out=out, max_seqlen_q=x.max_q, cu_seqlens_q=cu_q, max_seqlen_k=x.max_k,
        cu_seqlens_k=cu_k, softmax_scale=q.shape[-1] ** -0.5, causal=x.causal, fa_version=3,
    )  # fmt: skip

    def run() -> torch.Tensor:
        call()
        return out.view_as(x.q)

    return run


def fa3_paged(x: Inputs, pages: Pages) -> Call:
    """FlashAttention 3 over a paged cache, from vLLM; plans inside each call. Raises ImportError without vLLM."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    out = torch.empty_like(x.q)
    call = functools.partial(
        flash_attn_varlen_func, q=x.q, k=pages.k_cache, v=pages.v_cache, out=out, max_seqlen_q=x.max_q,
        cu_seqlens_q=x.cu_q, max_seqlen_k=x.max_k, seqused_k=pages.seq_lens, block_table=pages.block_table,
        softmax_scale=x.q.shape[-1] ** -0.5, causal=True, fa_version=3,
    )  # fmt: skip

    def run() -> torch.Tensor:
        call()
        return out

    return run


def vllm_triton(x: Inputs, pages: Pages) -> Call:
    """vLLM's Triton unified attention over a paged cache. Raises ImportError without vLLM."""
    from vllm.v1.attention.ops.triton_unified_attention import unified_attention

    out = torch.empty_like(x.q)
    call = functools.partial(
        unified_attention, q=x.q, k=pages.k_cache, v=pages.v_cache, out=out, cu_seqlens_q=x.cu_q, max_seqlen_q=x.max_q,
        seqused_k=pages.seq_lens, max_seqlen_k=x.max_k, softmax_scale=x.q.shape[-1] ** -0.5, causal=True,
        window_size=(-1, -1), block_table=pages.block_table, softcap=0.0, q_descale=None, k_descale=None,
        v_descale=None,
    )  # fmt: skip

    def run() -> torch.Tensor:
        call()
        return out

    return run


PAGED_PEERS = {"fa3_paged": fa3_paged, "vllm_triton": vllm_triton}
PEERS: dict[str, Peer] = {
    "fa2": sdpa(SDPBackend.FLASH_ATTENTION),
    "cudnn": sdpa(SDPBackend.CUDNN_ATTENTION),
    "flex": flex,
    "fa3": fa3,
}
