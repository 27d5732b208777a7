"""Prefill over a paged cache beside its peers: whole prompts, chunks after a prefix, and a chunk beside decode steps.

TFLOP/s as in `labkit.benchmarks.flash_attention`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels import flash_attention_paged_hopper
from kernels.flash_attention_paged import paged_prefill
from labkit.benchmarks import flash_attention
from labkit.benchmarks.evidence import Row
from labkit.benchmarks.flash_attention import Case, make, rows_of
from labkit.benchmarks.flash_peers import PAGED_PEERS, Inputs, Pages
from labkit.benchmarks.timing import Call, race

PACKAGES = flash_attention.PACKAGES
summary = flash_attention.summary


@dataclass(frozen=True)
class Paged(Case):
    """A case over blocks of `block_size` tokens."""

    block_size: int = 16

    @property
    def name(self) -> str:
        return f"{super().name}, block size {self.block_size}"


def cases() -> list[Paged]:
    """Shapes of a server's steps with the heads of Llama 3 8B; then other heads and block sizes."""

    def case(q: list[int], k: list[int], h: int = 32, kv: int = 8, dim: int = 128, block_size: int = 16) -> Paged:
        return Paged("paged", tuple(q), tuple(k), True, h, kv, dim, ("fa3_paged", "vllm_triton"), block_size)

    prompts = ([4096] * 4, [4096] * 4)
    return [
        case(*prompts),
        case([2048], [8192]),
        case([512] * 8, [4096] * 8),
        case([64] * 32, [2048] * 32),
        case([2048, *[1] * 31], [8192, *[4096] * 31]),
        case(*prompts, block_size=128),
        case(*prompts, 16, 16),
        case(*prompts, 64, 8),
        case(*prompts, 32, 8, 64),
        case([2048] * 4, [2048] * 4, 16, 4, 256),
    ]


def scattered(case: Paged) -> Pages:
    """A random cache that holds the case's keys in blocks that are scattered over memory."""
    used = [-(-n // case.block_size) for n in case.k_lens]
    shape = (sum(used), case.block_size, case.num_kv_heads, case.head_dim)
    k_cache, v_cache = (torch.randn(shape, device="cuda").bfloat16() for _ in range(2))
    table = torch.zeros(len(used), max(used), dtype=torch.int32, device="cuda")
    for row, blocks in zip(table, torch.randperm(sum(used), dtype=torch.int32).split(used), strict=True):
        row[: len(blocks)] = blocks
    return Pages(k_cache, v_cache, table, torch.tensor(case.k_lens, dtype=torch.int32, device="cuda"))


def ours(x: Inputs, pages: Pages, variant: str) -> Call:
    """A call of one of our kernels."""
    ends, out = x.cu_q, torch.empty_like(x.q)
    assert ends is not None
    cache = (pages.k_cache, pages.v_cache, pages.block_table, pages.seq_lens)
    return lambda: paged_prefill(x.q, *cache, ends, out=out, variant=variant)


def contenders(case: Paged) -> dict[str, list[Call]]:
    """Everything that races in this case, name -> calls. Raises RuntimeError if one computes something else."""
    pairs = [(x, scattered(case)) for x in make(case)]
    first, pages = pairs[0]
    calls = {"tl": [ours(x, p, "tl") for x, p in pairs]}
    if flash_attention_paged_hopper.unsupported(first.q, pages.k_cache, pages.v_cache) is None:
        calls["hopper"] = [ours(x, p, "hopper") for x, p in pairs]
    for name in case.peers:
        try:
            calls[name] = [PAGED_PEERS[name](x, p) for x, p in pairs]
            calls[name][0]()
        except (ImportError, RuntimeError, NotImplementedError):
            calls.pop(name, None)  # not installed, or not made for this shape
    expected = calls["tl"][0]()
    for name, mine in calls.items():
        if not torch.allclose(mine[0]().float(), expected.float(), atol=1e-2, rtol=2e-2):
            raise RuntimeError(f"{case.name}: {name} and tl disagree, so their times say nothing")
    return calls


def run() -> list[Row]:
    """Every case."""
    rows = []
    for case in tqdm(cases(), desc="paged_prefill"):
        rows += rows_of(case, race(contenders(case)))
        torch.cuda.empty_cache()
    return rows
