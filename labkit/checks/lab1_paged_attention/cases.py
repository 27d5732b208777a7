"""Inputs and oracles for the attention questions: scattered blocks, strided caches, garbage elsewhere."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from labkit import device
from labkit.checks.values import close, run, run_launching

GARBAGE = 40.0  # stands in every slot that no sequence owns: large enough to show, finite so that 0 * garbage is 0


@dataclass
class Case:
    """One decode step. q: [num_seqs, num_heads, head_dim]; q and both caches are views with strides of their own."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    dense: list[tuple[torch.Tensor, torch.Tensor]]  # K and V of each sequence, [length, num_kv_heads, head_dim]

    @property
    def arguments(self) -> tuple:
        return (self.q, self.k_cache, self.v_cache, self.block_table, self.seq_lens, self.scale)


def make_case(
    seq_lens: list[int],
    num_heads: int = 2,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    dtype: torch.dtype = torch.float16,
    seed: int = 0,
    loudness: float = 1.0,
    rising: bool = False,
    meaningful: bool = True,
    offset: float = 0.0,
) -> Case:
    """Random case with permuted, non-contiguous blocks.

    loudness: factor on q, so that scores grow. rising: along a sequence the scores grow, so that
    the running maximum of an online softmax changes in every block. meaningful: what stands in the block table past a
    sequence's last block is the id of some block; else it is none, and must not be followed. offset: added to V.
    """
    g = torch.Generator().manual_seed(seed)
    per_seq = [math.ceil(n / block_size) for n in seq_lens]
    num_blocks = sum(per_seq) + 3
    free = torch.randperm(num_blocks, generator=g).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = k_view(shape, dtype), v_view(shape, dtype)
    table = torch.randint(0, num_blocks, (len(seq_lens), max([*per_seq, 0]) + 1), generator=g, dtype=torch.int32)
    if not meaningful:
        table.fill_(2**30)
    q = torch.full((len(seq_lens), num_heads + 1, head_dim + 8), GARBAGE).to(device.name(), dtype)[
        :, :num_heads, :head_dim
    ]
    q.copy_(torch.randn(q.shape, generator=g).to(dtype) * loudness)
    dense = []
    for i, length in enumerate(seq_lens):
        k, v = (torch.randn(length, num_kv_heads, head_dim, generator=g).to(dtype) for _ in "kv")
        v += offset
        if rising:
            direction = q[i].cpu().reshape(num_kv_heads, -1, head_dim).sum(1).float()
            step = torch.linspace(0, 4, length).view(-1, 1, 1)
            k = (k.float() + step * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
        blocks = [free.pop() for _ in range(per_seq[i])]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for t in range(length):
            k_cache[blocks[t // block_size], t % block_size] = k[t].to(k_cache.device)
            v_cache[blocks[t // block_size], t % block_size] = v[t].to(v_cache.device)
        dense.append((k, v))
    where = device.name()
    lens = torch.tensor(seq_lens, dtype=torch.int32, device=where)
    return Case(q, k_cache, v_cache, table.to(where), lens, head_dim**-0.5, dense)


def k_view(shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """A K cache of garbage: every second block of a tensor that holds K and V, as vLLM lays them out."""
    num_blocks, *rest = shape
    return torch.full((num_blocks, 2, *rest), GARBAGE).to(device.name(), dtype)[:, 0]


def v_view(shape: tuple[int, int, int, int], dtype: torch.dtype) -> torch.Tensor:
    """A V cache of garbage with other strides than the K cache has: gaps after each block and each token."""
    num_blocks, block_size, heads, head_dim = shape
    whole = torch.full((num_blocks, block_size + 1, heads + 2, head_dim), GARBAGE).to(device.name(), dtype)
    return whole[:, :block_size, :heads]


def attention(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Plain attention in `dtype` over the dense K and V: the oracle in fp64, the same-precision peer in q's dtype."""
    o = torch.zeros(case.q.shape, dtype=dtype)
    for i, (k, v) in enumerate(case.dense):
        if not len(k):
            continue
        group = case.q.shape[1] // k.shape[1]
        k, v = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("hd,thd->ht", case.q[i].cpu().to(dtype) * case.scale, k)
        o[i] = torch.einsum("ht,thd->hd", torch.softmax(scores, dim=-1), v)
    return o


def agree(answer, case: Case, look_at: str, refused: set[str] | None = None, **options) -> float:
    """Call the answer on a case and compare it with the oracle; what to look at comes first where values differ.

    refused: torch operations that an answer which must launch a kernel may not use; None where torch does the work.
    """
    call = run if refused is None else run_launching
    got = call(answer, *case.arguments, refused=refused, **options)
    return close(got, attention(case, torch.float64), attention(case, case.q.dtype), look_at)
