"""Decode attention over a quantized KV cache beside our own over the same keys and values in bf16."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels.kv_cache_quantized import KINDS, QuantizedCache, write_kv_quantized
from kernels.paged_attention import Workspace, paged_attention
from kernels.paged_attention_quantized import allocate_workspace, paged_attention_quantized
from labkit.benchmarks.evidence import Row, geometric_mean, ratios
from labkit.benchmarks.timing import Call, race

PACKAGES = ()
HEAD_DIM = 128
BLOCK_SIZE = 16
LARGE = 10**9  # bytes of K and V in bf16
ERRORS = {"fp8": 0.1, "int8": 0.05, "int4": 0.3}  # beyond what quantizing normal values explains


@dataclass(frozen=True)
class Case:
    """Sequences of equal length; heads of 128."""

    batch: int
    context: int
    num_heads: int = 32
    num_kv_heads: int = 8

    @property
    def name(self) -> str:
        heads = (
            f", {self.num_heads}/{self.num_kv_heads} heads" if (self.num_heads, self.num_kv_heads) != (32, 8) else ""
        )
        return f"{self.batch} x {self.context}{heads}"

    @property
    def bytes(self) -> int:
        """Of K and V in bf16."""
        return 2 * 2 * self.batch * self.context * self.num_kv_heads * HEAD_DIM


def cases() -> list[Case]:
    """Contexts from 8k with over 1 GB of K and V; other heads; then smaller ones."""
    large = [Case(32, 8192), Case(128, 8192), Case(8, 32768), Case(16, 65536), Case(1, 262144)]
    return [*large, Case(32, 8192, 64, 8), Case(1, 8192), Case(16, 2048)]


def contenders(case: Case) -> dict[str, Call]:
    """Calls of a case, one for bf16 and one a kind. Raises RuntimeError if one computes something else.

    K and V of large cases exceed the L2 cache many times over; small ones are read from it, in bf16 as well.
    """
    q = torch.randn(case.batch, case.num_heads, HEAD_DIM, device="cuda").bfloat16()
    blocks = case.batch * case.context // BLOCK_SIZE
    shape = (blocks, BLOCK_SIZE, case.num_kv_heads, HEAD_DIM)
    k, v = (torch.empty(shape, dtype=torch.bfloat16, device="cuda").normal_() for _ in range(2))
    table = torch.randperm(blocks, dtype=torch.int32, device="cuda").view(case.batch, -1)
    lens = torch.full((case.batch,), case.context, dtype=torch.int32, device="cuda")
    heads = (case.num_heads, case.num_kv_heads, HEAD_DIM, q.dtype, q.device)
    calls: dict[str, Call] = {
        "own_bf16": functools.partial(
            paged_attention, q, k, v, table, lens, out=torch.empty_like(q), workspace=Workspace.allocate(*heads)
        )
    }
    expected = calls["own_bf16"]().float()
    slots = torch.arange(blocks * BLOCK_SIZE, device="cuda")
    for kind in KINDS:
        cache = QuantizedCache.allocate(kind, *shape, "cuda")
        write_kv_quantized(k.flatten(0, 1), v.flatten(0, 1), cache, slots)
        calls[kind] = functools.partial(
            paged_attention_quantized, q, cache, table, lens, out=torch.empty_like(q),
            workspace=allocate_workspace(kind, *heads),
        )  # fmt: skip
        error = ((calls[kind]().float() - expected).norm() / expected.norm()).item()
        if not error < ERRORS[kind]:
            raise RuntimeError(f"{case.name}: {kind} and bf16 differ by {error:.3g}, so their times say nothing")
    return calls


def measure(case: Case) -> list[Row]:
    """A row for each kind."""
    timings = race({name: [call] for name, call in contenders(case).items()})
    times = {name: round(timing.seconds * 1e6, 2) for name, timing in timings.items()}
    peers = {"own_bf16": times.pop("own_bf16")}
    return [
        Row(case.name, "us", "lower", times[kind], peers, round(timings[kind].spread, 4), variant=kind)
        for kind in KINDS
    ]  # fmt: skip


def run() -> list[Row]:
    """All cases."""
    rows = []
    for case in tqdm(cases(), desc="kv_cache"):
        rows += measure(case)
        torch.cuda.empty_cache()
    return rows


def summary(rows: list[Row]) -> str:
    """The figures that are quoted, computed from the rows."""
    large = {case.name for case in cases() if case.bytes > LARGE and case.context >= 8192}
    lines = []
    for kind in KINDS:
        found = ratios([row for row in rows if row.variant == kind and row.case in large], "own_bf16")
        if found:
            worst = min(found, key=lambda case: found[case])
            mean = geometric_mean(list(found.values()))
            lines.append(f"{kind}, over 1 GB: geometric mean {mean:.3f}x, worst {found[worst]:.3f}x ({worst})")
    return "\n".join(lines)
