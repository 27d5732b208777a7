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


def flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention with the whole matrix of scores, computed in `dtype`, of one batch of equal lengths.

    Arguments as in kernels.flash_attention, unpacked. Gives the output [batch, q_len, num_heads, head_dim] and the
    log-sum-exp [batch, num_heads, q_len], both of `dtype`. A query that sees no key gives zeros and -inf.
    """
    group = q.shape[2] // k.shape[2]
    q_len, k_len = q.shape[1], k.shape[1]
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    k, v = (x.to(dtype).repeat_interleave(group, dim=2) for x in (k, v))
    scores = torch.einsum("bqhd,bkhd->bhqk", q.to(dtype), k) * scale
    if causal:
        seen = torch.ones(q_len, k_len, dtype=torch.bool, device=q.device).tril(k_len - q_len)
        scores = scores.masked_fill(~seen, float("-inf"))
    lse = scores.logsumexp(dim=-1)
    weights = (scores - torch.where(lse.isinf(), 0.0, lse).unsqueeze(-1)).exp()
    return torch.einsum("bhqk,bkhd->bqhd", weights, v), lse


def packed_flash_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of packed sequences, one after another.

    Arguments as in kernels.flash_attention, packed. Gives [total_q, num_heads, head_dim] and [num_heads, total_q].
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype, device=q.device)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    for s in range(len(starts_q) - 1):
        mine, its = slice(*starts_q[s : s + 2]), slice(*starts_k[s : s + 2])
        o, sums = flash_attention(q[None, mine], k[None, its], v[None, its], causal=causal, scale=scale, dtype=dtype)
        out[mine], lse[:, mine] = o[0], sums[0]
    return out, lse


def paged_prefill(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    *,
    scale: float | None = None,
    dtype: torch.dtype = torch.float64,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention of each sequence's newest tokens over all its tokens in the cache, one sequence after another.

    Arguments as in kernels.flash_attention_paged.paged_prefill. Gives [num_tokens, num_heads, head_dim] and
    [num_heads, num_tokens], both of `dtype`.
    """
    out = torch.zeros(q.shape, dtype=dtype, device=q.device)
    lse = torch.full((q.shape[1], q.shape[0]), float("-inf"), dtype=dtype, device=q.device)
    starts = cu_seqlens_q.tolist()
    for s, seq_len in enumerate(seq_lens.tolist()):
        mine = slice(starts[s], starts[s + 1])
        k, v = (gather_kv(cache, block_table[s], seq_len).unsqueeze(0) for cache in (k_cache, v_cache))
        o, sums = flash_attention(q[None, mine], k, v, causal=True, scale=scale, dtype=dtype)
        out[mine], lse[:, mine] = o[0], sums[0]
    return out, lse


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x / rms(x) * weight over the last dimension, computed in `dtype`."""
    x = x.to(dtype)
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight.to(dtype)


def rotate(
    x: torch.Tensor, rope_table: torch.Tensor, positions: torch.Tensor, *, dtype: torch.dtype = torch.float64
) -> torch.Tensor:
    """Rotary embedding on halves, computed in `dtype`. x: [rows, heads, head_dim]; others as in kernels.fused."""
    cos, sin = rope_table[:, positions.long(), None].to(dtype)  # (rows, 1, head_dim) each
    low, high = x.to(dtype).chunk(2, -1)
    return x.to(dtype) * cos + torch.cat((-high, low), -1) * sin


def silu_mul(gate_up: torch.Tensor, *, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """silu(gate) * up of the two halves of the last dimension, computed in `dtype`."""
    gate, up = gate_up.to(dtype).chunk(2, -1)
    return gate * torch.sigmoid(gate) * up


def dequantize_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    group_size: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """The weights [out_features, in_features] of an AutoAWQ checkpoint, rounded once to `dtype`.

    Arguments as in kernels.int4_repack.repack_awq; scales are rounded to `dtype` before they multiply.
    """
    order = torch.tensor([0, 4, 1, 5, 2, 6, 3, 7], device=qweight.device)  # the nibble that has column i of 8
    shifts = 4 * order

    def unpacked(words: torch.Tensor) -> torch.Tensor:
        return ((words.unsqueeze(-1) >> shifts) & 15).flatten(1).double()

    size = qweight.shape[0] if group_size == -1 else group_size
    zeros, factors = (t.repeat_interleave(size, dim=0) for t in (unpacked(qzeros), scales.to(dtype).double()))
    return ((unpacked(qweight) - zeros) * factors).to(dtype).T


def int4_matmul(x: torch.Tensor, weight: torch.Tensor, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """x times the transpose of dequantized weights [out_features, in_features], computed in `dtype`."""
    return x.to(dtype) @ weight.to(dtype).T


def quantize_kv(x: torch.Tensor, kind: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """K or V [..., head_dim] to codes of the same shape, float32, and scales and offsets [...], float32.

    kind: "fp8", "int8" or "int4", as kernels.kv_cache_quantized describes them.
    """
    x = x.float()
    if kind == "int4":
        least, most = x.amin(-1), x.amax(-1)
        scale, offset = ((most - least) / 15).half().float(), least.half().float()
        factor = torch.where(scale == 0, 0.0, 1 / scale)
        return ((x - offset[..., None]) * factor[..., None] + 0.5).floor().clamp(0, 15), scale, offset
    scale = x.abs().amax(-1) / (448 if kind == "fp8" else 127)
    codes = x / torch.where(scale == 0, 1.0, scale)[..., None]
    rounded = codes.clamp(-448, 448).to(torch.float8_e4m3fn).float() if kind == "fp8" else (codes + 0.5).floor()
    return rounded, scale, torch.zeros_like(scale)


def quantized_codes(cache: torch.Tensor, scales: torch.Tensor, kind: str) -> tuple[torch.Tensor, ...]:
    """What a quantized cache's k or v and its scales hold: codes [num_blocks, block_size, num_kv_heads, head_dim],
    scales and offsets [num_blocks, block_size, num_kv_heads], all float32."""
    scales = scales.transpose(1, 2).contiguous()
    if kind != "int4":
        return cache.float(), scales, torch.zeros_like(scales)
    halves = scales.unsqueeze(-1).view(torch.float16).float()  # little-endian: the scale comes first
    return torch.cat([cache & 15, cache >> 4], -1).float(), halves[..., 0], halves[..., 1]


def dequantize_kv(cache: torch.Tensor, scales: torch.Tensor, kind: str) -> torch.Tensor:
    """The K or V that a quantized cache stands for, float32 [num_blocks, block_size, num_kv_heads, head_dim]."""
    codes, factors, offsets = quantized_codes(cache, scales, kind)
    return codes * factors[..., None] + offsets[..., None]
