"""FlashAttention walked tile by tile over a small example: what the tile widget draws."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Visit:
    """One tile of QK^T, after it was taken in.

    row_tile, key_tile: its place. scores: [block_m, block_n], -inf where masked. m, l, acc: the running values of each
    row, acc [block_m, head_dim] not yet divided by l. alpha: by what the old l and acc were multiplied.
    """

    row_tile: int
    key_tile: int
    scores: torch.Tensor
    m: torch.Tensor
    l: torch.Tensor  # noqa: E741  (the letter of the papers)
    acc: torch.Tensor
    alpha: torch.Tensor


@dataclass(frozen=True)
class TileWalk:
    """All visits of a whole forward pass, row tile by row tile; tiles that nobody sees are not visited."""

    seq_len: int
    block_m: int
    block_n: int
    causal: bool
    scores: torch.Tensor  # [seq_len, seq_len], -inf where masked
    visits: list[Visit]
    o: torch.Tensor  # [seq_len, head_dim]

    @property
    def visited(self) -> set[tuple[int, int]]:
        """(row tile, key tile) of every visit."""
        return {(v.row_tile, v.key_tile) for v in self.visits}


def walk(seq_len: int = 12, block_m: int = 4, block_n: int = 4, causal: bool = True, seed: int = 3) -> TileWalk:
    """Walk a random example with head_dim 2. ValueError unless the tiles divide seq_len."""
    if seq_len < 1 or seq_len % block_m or seq_len % block_n:
        raise ValueError(f"block_m {block_m} and block_n {block_n} must divide seq_len {seq_len}")
    g = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(seq_len, 2, generator=g) * 1.5 for _ in "qkv")
    scores = q @ k.T / 2**0.5
    if causal:
        scores = scores.masked_fill(~torch.ones_like(scores, dtype=torch.bool).tril(), float("-inf"))
    visits: list[Visit] = []
    for i in range(seq_len // block_m):
        visits += _row_tile(scores[i * block_m : (i + 1) * block_m], v, i, block_m, block_n, causal)
    last = {visit.row_tile: visit for visit in visits}
    o = torch.cat([visit.acc / visit.l[:, None] for visit in last.values()])
    return TileWalk(seq_len, block_m, block_n, causal, scores, visits, o)


def _row_tile(s: torch.Tensor, v: torch.Tensor, row_tile: int, block_m: int, block_n: int, causal: bool) -> list[Visit]:
    m = torch.full((block_m,), float("-inf"))
    total = torch.zeros(block_m)
    acc = torch.zeros(block_m, v.shape[1])
    visits = []
    for key_tile in range(s.shape[1] // block_n):
        start = key_tile * block_n
        if causal and start > (row_tile + 1) * block_m - 1:
            break
        tile = s[:, start : start + block_n]
        m_new = torch.maximum(m, tile.max(dim=1).values)
        alpha = torch.exp(m - m_new)
        p = torch.exp(tile - m_new[:, None])
        total = total * alpha + p.sum(dim=1)
        acc = acc * alpha[:, None] + p @ v[start : start + block_n]
        m = m_new
        visits.append(Visit(row_tile, key_tile, tile, m, total, acc, alpha))
    return visits
