"""Inputs and oracles for the attention questions of lab 2: strided inputs, garbage around them, dense fp64."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from labkit import device
from labkit.checks.values import close, run_kernel

GARBAGE = 40.0  # before and behind every tensor: large enough to show, finite so that 0 * garbage is 0


@dataclass
class Case:
    """q: [seq_q, heads, head_dim]. k, v: [seq_k, kv_heads, head_dim]. All are views with garbage around them."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    causal: bool = False

    @property
    def arguments(self) -> tuple:
        """What an answer is called with."""
        return (self.q, self.k, self.v, self.scale)


def framed(shape: tuple[int, ...], g: torch.Generator, dtype: torch.dtype, margin: int = 70) -> torch.Tensor:
    """A random [rows, heads, head_dim] view of a larger tensor: strided, with garbage rows before and behind."""
    rows, heads, head_dim = shape
    whole = torch.full((rows + 2 * margin, heads + 1, head_dim), GARBAGE).to(dtype)
    whole[margin : margin + rows, :heads] = torch.randn(shape, generator=g).to(dtype)
    return whole.to(device.name())[margin : margin + rows, :heads]


def make_case(
    seq_q: int,
    seq_k: int | None = None,
    heads: int = 1,
    kv_heads: int | None = None,
    head_dim: int = 64,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    causal: bool = False,
    loudness: float = 1.0,
    rising: bool = False,
    offset: float = 0.0,
) -> Case:
    """A random case. loudness: factor on q. rising: later keys score higher. offset: added to v."""
    g = torch.Generator().manual_seed(seed)
    seq_k, kv_heads = seq_k or seq_q, kv_heads or heads
    q = framed((seq_q, heads, head_dim), g, dtype)
    k, v = (framed((seq_k, kv_heads, head_dim), g, dtype) for _ in "kv")
    q *= loudness
    v += offset
    if rising:
        direction = q.float().mean(0, keepdim=True)[:, :kv_heads]
        ramp = torch.linspace(0, 6, seq_k, device=q.device)[:, None, None]
        k += (ramp * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
    return Case(q, k, v, head_dim**-0.5, causal)


def attention(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Dense attention in `dtype` on the CPU: the oracle in fp64, the same-precision peer in the inputs' dtype."""
    q, k, v = (x.cpu().to(dtype) for x in (case.q, case.k, case.v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q * case.scale, k)
    if case.causal:
        visible = torch.ones(q.shape[0], k.shape[0], dtype=torch.bool).tril(k.shape[0] - q.shape[0])
        scores = scores.masked_fill(~visible, float("-inf"))
    return torch.einsum("hqk,khd->qhd", torch.softmax(scores, dim=-1), v)


def agree(answer, case: Case, look_at: str, **options) -> float:
    """Call the answer on a case and compare with the oracle; what to look at comes first where values differ."""
    got = run_kernel(answer, case.q, case.k, case.v, case.scale, **options)
    return close(got, attention(case, torch.float64), attention(case, case.q.dtype), look_at)
