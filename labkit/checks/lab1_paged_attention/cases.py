"""Inputs and oracles for the attention questions: scattered blocks, strided caches, garbage where nobody may look."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from unittest import mock

import torch

from labkit import device
from labkit.checks import compare
from labkit.checks.contract import Failed

GARBAGE = 40.0  # stands in every slot that no sequence owns: large enough to show, finite so that 0 * garbage is 0


@dataclass
class Case:
    """One decode step. q: [num_seqs, num_heads, head_dim]; caches: views with gaps, as vLLM has them."""

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
) -> Case:
    """Random case with permuted, non-contiguous blocks.

    loudness: factor on q, so that scores grow. rising: along a sequence the scores grow, so that
    the running maximum of an online softmax changes in every block.
    """
    g = torch.Generator().manual_seed(seed)
    per_seq = [math.ceil(n / block_size) for n in seq_lens]
    num_blocks = sum(per_seq) + 3
    free = torch.randperm(num_blocks, generator=g).tolist()
    both = torch.full((num_blocks, 2, block_size, num_kv_heads, head_dim), GARBAGE).to(dtype)
    k_cache, v_cache = both[:, 0], both[:, 1]
    table = torch.randint(0, num_blocks, (len(seq_lens), max([*per_seq, 0]) + 1), generator=g, dtype=torch.int32)
    q = torch.randn(len(seq_lens), num_heads, head_dim, generator=g).to(dtype) * loudness
    dense = []
    for i, length in enumerate(seq_lens):
        k, v = (torch.randn(length, num_kv_heads, head_dim, generator=g).to(dtype) for _ in "kv")
        if rising:
            direction = q[i].view(num_kv_heads, -1, head_dim).sum(1).float()
            step = torch.linspace(0, 4, length).view(-1, 1, 1)
            k = (k.float() + step * direction / direction.norm(dim=-1, keepdim=True)).to(dtype)
        blocks = [free.pop() for _ in range(per_seq[i])]
        table[i, : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        for t in range(length):
            k_cache[blocks[t // block_size], t % block_size] = k[t]
            v_cache[blocks[t // block_size], t % block_size] = v[t]
        dense.append((k, v))
    where = device.name()
    both, lens = both.to(where), torch.tensor(seq_lens, dtype=torch.int32, device=where)
    return Case(q.to(where), both[:, 0], both[:, 1], table.to(where), lens, head_dim**-0.5, dense)


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


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what torch.empty and torch.empty_like give with poison, so that an output nobody writes is seen."""

    def poisoned(make):
        def allocate(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return compare.poison(tensor) if tensor.dtype in compare.POISON_BITS else tensor

        return allocate

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
    ):
        yield


def agree(answer, case: Case, look_at: str, **options) -> float:
    """Call the answer on a case and compare it with the oracle; what to look at comes first in every message."""
    with poisoned_allocations():
        got = answer(*case.arguments, **options)
    try:
        return compare.close(got, attention(case, torch.float64), attention(case, case.q.dtype), look_at=look_at)
    except Failed as failure:
        message = str(failure)
        raise Failed(message if message.startswith(look_at) else f"{look_at}: {message}") from None
