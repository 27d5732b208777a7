"""Choosing the next tokens on the device, without a generator's state.

Random numbers are a hash of (seed, position, token id): a request draws the same ones in any batch, on any device, and
again after a preemption. Sampling by the largest logit plus Gumbel noise needs no division and no second pass.
"""

from __future__ import annotations

import torch

MASK = 0xFFFFFFFF


def mix(x: torch.Tensor) -> torch.Tensor:
    """A bijection of 32-bit numbers that spreads every bit over all; int64 in and out.

    Rounds and constants: C. Wellons, "Prospecting for hash functions", 2018 and after. Both factors are below 2**31,
    so that no product leaves int64.
    """
    x = (x ^ (x >> 16)) * 0x21F0AAAD & MASK
    x = (x ^ (x >> 15)) * 0x735A2D97 & MASK
    return x ^ (x >> 15)


def uniform(seeds: torch.Tensor, positions: torch.Tensor, count: int) -> torch.Tensor:
    """[rows, count] float32 in (0, 1). seeds, positions: [rows] int64, not negative."""
    keys = mix(mix(seeds & MASK) ^ (positions & MASK))  # (rows,)
    columns = mix(torch.arange(count, device=seeds.device) + 1)  # (count,)
    bits = mix(keys[:, None] ^ columns[None, :]) >> 9  # 23 bits and a half: never rounds to 0 or 1
    return (bits.float() + 0.5) * 2.0**-23


def sample(
    logits: torch.Tensor, temperatures: torch.Tensor, top_ps: torch.Tensor, seeds: torch.Tensor, positions: torch.Tensor
) -> torch.Tensor:
    """One token for each row; [rows] int64. Nothing is read on the host.

    logits: [rows, vocab_size]. temperatures, top_ps: [rows] float32; a row of temperature 0 is greedy. seeds: [rows]
    int64. positions: [rows] int64, of the token that is sampled.
    """
    scaled = logits.float() / temperatures.clamp_min(1e-6)[:, None]
    ranked, order = scaled.sort(-1, descending=True)
    probs = ranked.softmax(-1)
    before = probs.cumsum(-1) - probs  # probability of all that is likelier
    # Never drop the first: its `before` may be an ulp off 0.
    dropped = (before >= top_ps[:, None]).index_fill(-1, torch.zeros(1, dtype=torch.int64, device=logits.device), False)
    noise = -torch.log(-torch.log(uniform(seeds, positions, logits.shape[-1])))
    noisy = ranked.masked_fill(dropped, float("-inf")) + noise.gather(-1, order)
    drawn = order.gather(-1, noisy.argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(temperatures > 0, drawn, logits.argmax(-1))
