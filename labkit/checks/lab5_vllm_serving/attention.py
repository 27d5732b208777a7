"""Attention for vLLM: decode steps and chunks of prompts in one batch, through block tables."""

from __future__ import annotations

import torch

from labkit.checks import values
from labkit.checks.contract import Question, require

LAB = "lab5_vllm_serving"
KERNELS = (
    "kernels.flash_attention", "kernels.flash_attention_hopper", "kernels.flash_attention_paged",
    "kernels.paged_attention", "kernels.reference", "labkit.engine.ops", "labkit.engine.triton_ops",
    "labkit.serve.plugins.attention", "labkit.serve.plugins.attention_cpu", "labkit.serve.plugins.attention_cuda",
)  # fmt: skip

own_attention = Question(
    "own_attention", LAB, "every query attends to the tokens up to its own, through the block table", KERNELS
)

NAMES = ("q", "k_cache", "v_cache", "block_table", "seq_lens", "cu_seqlens_q")
GARBAGE = 30.0  # in every slot that no sequence owns


def batch(
    lengths: list[int], chunks: list[int], heads: int = 4, kv_heads: int = 2, head_dim: int = 32, block_size: int = 16,
    seed: int = 0,
) -> list[torch.Tensor]:  # fmt: skip
    """q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q: fp16, blocks scattered as vLLM has them."""
    random = torch.Generator().manual_seed(seed)
    blocks = [-(-length // block_size) for length in lengths]
    kv_cache = torch.full((sum(blocks) + 3, kv_heads, block_size, 2 * head_dim), GARBAGE, dtype=torch.float16)
    order = torch.randperm(len(kv_cache), generator=random).to(torch.int32)
    table = order[: len(lengths)].unsqueeze(1).repeat(1, max(blocks) + 1)  # past a row's end stand other blocks' ids
    for row, length, mine in zip(table, lengths, order[: sum(blocks)].split(blocks), strict=True):
        row[: len(mine)] = mine
        for position in range(length):
            new = torch.randn(kv_heads, 2 * head_dim, generator=random)
            kv_cache[int(mine[position // block_size]), :, position % block_size] = new
    k_cache, v_cache = kv_cache.transpose(1, 2).chunk(2, dim=-1)
    q = torch.randn(sum(chunks), heads, head_dim, generator=random).half()
    starts = torch.tensor([0, *chunks]).cumsum(0).to(torch.int32)
    return [q, k_cache, v_cache, table, torch.tensor(lengths, dtype=torch.int32), starts]


def dense(arguments: list[torch.Tensor], scale: float, dtype: torch.dtype) -> torch.Tensor:
    """What is to come out, computed in `dtype` one query at a time: the oracle in fp64, the peer in fp16."""
    q, k_cache, v_cache, table, seq_lens, starts = arguments
    out = torch.empty_like(q, dtype=dtype)
    group, size = q.shape[1] // k_cache.shape[2], k_cache.shape[1]
    for s, length in enumerate(seq_lens.tolist()):
        first, end = int(starts[s]), int(starts[s + 1])
        for row in range(first, end):
            seen = torch.arange(length - (end - row) + 1)
            slots = (table[s, seen // size].long(), seen % size)
            k, v = (cache[slots].to(dtype).repeat_interleave(group, 1) for cache in (k_cache, v_cache))
            weights = torch.einsum("hd,khd->hk", q[row].to(dtype) * scale, k).softmax(-1)
            out[row] = torch.einsum("hk,khd->hd", weights, v)
    return out


def _attends(answer, look_at: str, lengths: list[int], chunks: list[int], scale: float = 0.2, **shape: int) -> float:
    arguments = batch(lengths, chunks, **shape)
    oracle, peer = (dense(arguments, scale, dtype) for dtype in (torch.float64, torch.float16))
    before = [tensor.clone() for tensor in arguments]
    got = values.run(answer, *arguments, scale)
    for name, was, now in zip(NAMES, before, arguments, strict=True):
        require(
            torch.equal(was, now), f"{name} is not what it was: later steps and layers read it, so write to a new one"
        )
    return values.close(got, oracle, peer, look_at)


@own_attention.invariant("one decode step: the newest token sees all tokens, and none beyond")
def _(answer) -> float:
    look_at = "one query, lengths 1, 15, 16, 17: which slots of the last block belong to the sequence?"
    return max(_attends(answer, look_at, [n], [1]) for n in (1, 15, 16, 17))


@own_attention.invariant("several sequences, each with its row of the table")
def _(answer) -> float:
    look_at = "sequence s has the queries cu_seqlens_q[s] to cu_seqlens_q[s + 1] and row s of block_table"
    return _attends(answer, look_at, [40, 3, 17], [1, 1, 1], seed=1)


@own_attention.invariant("a whole prompt: each token sees those before it and itself")
def _(answer) -> float:
    return _attends(answer, "a prompt of 19 tokens: is the mask causal?", [19], [19], seed=2)


@own_attention.invariant("a chunk of a prompt sees what is in the cache already")
def _(answer) -> float:
    look_at = "the last 7 of 40 tokens: query i of the chunk is token seq_len - chunk + i of its sequence"
    return _attends(answer, look_at, [40], [7], seed=3)


@own_attention.invariant("grouped heads: query head h reads KV head h // group")
def _(answer) -> float:
    return max(_attends(answer, f"8 query and {n} KV heads", [21], [5], heads=8, kv_heads=n, seed=4) for n in (1, 2, 8))


@own_attention.invariant("a real batch: prompts, chunks and decode steps mixed, and the scale that was given")
def _(answer) -> float:
    return _attends(answer, "a mixed batch", [33, 1, 50, 16, 7], [1, 1, 20, 16, 1], scale=0.05, seed=5)


QUESTIONS = [own_attention]
