"""The int4 matrix product beside cuBLAS in 16 bits, Marlin and Machete, from one token to thousands.

Weights are new to the caches at each call, as they are in a model: the calls rotate through copies.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels.int4_matmul import int4_matmul
from kernels.int4_parts import Workspace
from kernels.int4_repack import repack_awq
from labkit.benchmarks import int4_peers
from labkit.benchmarks.evidence import Row, geometric_mean, ratios
from labkit.benchmarks.int4_peers import Peer, Product, Weights
from labkit.benchmarks.timing import race

PACKAGES = ("vllm",)
SHAPES = ((4096, 4096), (8192, 8192), (8192, 28672))  # in_features, out_features
ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024)
RAGGED = (100, 4096, 11008)  # rows and outputs that fill no whole tiles
GROUP_SIZE = 128
ROTATED_BYTES = 256 * 2**20  # of all copies of the weights together: over four times an H200's L2
FEWEST_SETS = 2


@dataclass(frozen=True)
class Case:
    """One row of the benchmark: m tokens, k to n features."""

    m: int
    k: int
    n: int
    group_size: int = GROUP_SIZE

    @property
    def name(self) -> str:
        group = f", groups of {self.group_size}" if self.group_size != GROUP_SIZE else ""
        return f"{self.m} x {self.k} to {self.n}{group}"


def cases() -> list[Case]:
    """Every shape and number of tokens, and one ragged."""
    return [*(Case(m, k, n) for k, n in SHAPES for m in ROWS), Case(*RAGGED)]


def make(k: int, n: int, group_size: int) -> list[Weights]:
    """Random weights, so many that they exceed the L2 cache."""
    sets = max(FEWEST_SETS, -(-ROTATED_BYTES // (k * n // 2)))
    groups = 1 if group_size == -1 else k // group_size

    def words(rows: int) -> torch.Tensor:
        return torch.randint(-(2**31), 2**31, (rows, n // 8), dtype=torch.int32, device="cuda")

    def scales() -> torch.Tensor:
        return (torch.rand(groups, n, device="cuda") * 0.02 + 0.002).half()

    return [Weights(words(k), words(groups), scales(), group_size, torch.bfloat16) for _ in range(sets)]


def ours(w: Weights, workspace: Workspace) -> Product:
    """The kernel, with one workspace for all products, as a model's layers share it."""
    weight = repack_awq(w.qweight, w.qzeros, w.scales, group_size=w.group_size, dtype=w.dtype)
    return lambda x: int4_matmul(x, weight, workspace=workspace)


@functools.lru_cache(maxsize=1)  # cases of a shape follow each other
def products(k: int, n: int, group_size: int) -> dict[str, list[Product]]:
    """Ours and the peers, over the same weights."""
    workspace = Workspace.allocate("cuda")
    bound: dict[str, Peer] = {"ours": lambda w: ours(w, workspace)} | peers()
    found: dict[str, list[Product]] = {name: [] for name in bound}
    for w in make(k, n, group_size):
        for name, bind in bound.items():
            found[name].append(bind(w))
    return found


@functools.cache
def peers() -> dict[str, Peer]:
    """The peers that are there."""
    ways: dict[str, Peer | None] = {
        "bf16": int4_peers.bf16,
        "marlin": int4_peers.marlin(),
        "machete": int4_peers.machete(),
    }
    return {name: bind for name, bind in ways.items() if bind is not None}


def measure(case: Case) -> Row:
    """Time a case. Raises RuntimeError if a peer computes something else."""
    x = torch.randn(case.m, case.k, device="cuda").bfloat16()
    calls = {
        name: [functools.partial(product, x) for product in found]
        for name, found in products(case.k, case.n, case.group_size).items()
    }
    expected = calls["ours"][0]().float()
    for name, (first, *_) in calls.items():
        error = (first().float() - expected).norm() / expected.norm()
        if not error < 0.02:
            raise RuntimeError(f"{case.name}: {name} and ours differ by {error:.3g}, so their times say nothing")
    timings = race(calls)
    times = {name: round(timing.seconds * 1e6, 2) for name, timing in timings.items()}
    return Row(case.name, "us", "lower", times.pop("ours"), times, round(timings["ours"].spread, 4))


def run() -> list[Row]:
    """All cases."""
    rows = []
    for case in tqdm(cases(), desc="int4_matmul"):
        rows.append(measure(case))
        torch.cuda.empty_cache()
    return rows


def summary(rows: list[Row]) -> str:
    """The figures that are quoted, computed from the rows."""
    lines = []
    for peer in ("bf16", "marlin", "machete"):
        for what, few in (("up to 16 tokens", True), ("more", False)):
            found = ratios([row for row in rows if (int(row.case.split()[0]) <= 16) == few], peer)
            if found:
                worst = min(found, key=lambda case: found[case])
                mean = geometric_mean(list(found.values()))
                lines.append(f"{peer}, {what}: geometric mean {mean:.3f}x, worst {found[worst]:.3f}x ({worst})")
    return "\n".join(lines)
