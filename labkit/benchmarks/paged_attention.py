"""The paged decode kernel beside its peers, over the whole grid of batch and context that fits the GPU's memory.

Bandwidth counts K and V once: 2 * sum(seq_lens) * num_kv_heads * head_dim elements over the time of one call.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from tqdm import tqdm

from kernels.paged_attention import Workspace, paged_attention
from labkit.benchmarks import peers
from labkit.benchmarks.ceilings import memory_ceilings
from labkit.benchmarks.evidence import Row, geometric_mean, ratios
from labkit.benchmarks.peers import Inputs, Peer
from labkit.benchmarks.static_split import static_split
from labkit.benchmarks.timing import Call, Timing, race

PACKAGES = ("vllm",)
BATCHES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
CONTEXTS = tuple(512 << i for i in range(9))  # 512 to 128k
SPLITS = (1, 4, 16, 64)  # of the control; FlashAttention's rule gives 1 where batch * KV heads fill the SMs
ROTATED_BYTES = 512 * 2**20  # of all input sets together: over eight times an H200's L2


@dataclass(frozen=True)
class Case:
    """One row of the benchmark. lens: tokens of each sequence. table_tokens: capacity of a block table's row."""

    group: str
    lens: tuple[int, ...]
    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    block_size: int = 16
    table_tokens: int = 0

    @property
    def name(self) -> str:
        longest, shortest = max(self.lens), min(self.lens)
        lens = (
            f"batch {len(self.lens)} x {longest}"
            if longest == shortest
            else f"1 x {longest} + {len(self.lens) - 1} x {shortest}"
        )
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        wide = f", table for {self.table_tokens}" if self.table_tokens else ""
        return f"{self.group}: {lens}, {heads}, block {self.block_size}{wide}"

    @property
    def kv_bytes(self) -> int:
        return 2 * 2 * sum(self.lens) * self.num_kv_heads * self.head_dim


def grid() -> list[Case]:
    """Every batch and context: 32 query and 8 KV heads of 128, block size 16."""
    return [Case("grid", (context,) * batch) for batch in BATCHES for context in CONTEXTS]


def others() -> list[Case]:
    """Small and large blocks, lengths that differ, other heads, and a table as wide as a captured graph's."""
    shapes = [(1, 8192), (8, 2048), (16, 4096), (64, 4096)]
    cases = [Case("block size", (n,) * b, block_size=size) for size in (8, 32, 64, 128) for b, n in shapes]
    cases += [Case("block size", (n,) * b, 32, 32, block_size=8) for b, n in [(16, 128), (16, 2000), (16, 4000)]]
    cases += [Case("skewed", (131072, *[4096] * 31))]
    cases += [Case("MHA", (n,) * b, 32, 32) for b, n in shapes]
    cases += [Case("GQA 8", (n,) * b, 64, 8) for b, n in shapes]
    cases += [Case("head_dim 64", (n,) * b, head_dim=64) for b, n in shapes]
    cases += [Case("head_dim 256", (n,) * b, 16, 4, 256) for b, n in shapes]
    return cases + [Case("wide table", (n,) * b, table_tokens=131072) for b, n in [(1, 512), (8, 2048), (64, 4096)]]


class Pool:
    """Random K and V to lay caches of any shape over, so that large ones need not be filled for every case."""

    def __init__(self, elements: int) -> None:
        self.k, self.v = (torch.empty(elements, dtype=torch.bfloat16, device="cuda") for _ in range(2))
        for cache in (self.k, self.v):
            for part in cache.split(2**28):
                part.normal_()

    @property
    def bytes(self) -> int:
        """Of K and V together."""
        return 2 * self.k.numel() * self.k.element_size()

    def inputs(self, case: Case) -> Iterator[Inputs]:
        """Input sets whose blocks are disjoint and scattered over the whole pool."""
        block = (case.block_size, case.num_kv_heads, case.head_dim)
        per_block = case.block_size * case.num_kv_heads * case.head_dim
        num_blocks = self.k.numel() // per_block
        k_cache, v_cache = (cache[: num_blocks * per_block].view(num_blocks, *block) for cache in (self.k, self.v))
        used = [-(-n // case.block_size) for n in case.lens]
        seq_lens = torch.tensor(case.lens, dtype=torch.int32, device="cuda")
        width = max(max(used), -(-case.table_tokens // case.block_size))
        scattered = torch.randperm(num_blocks, device="cuda", dtype=torch.int32)
        sets = max(1, min(num_blocks // sum(used), -(-ROTATED_BYTES // case.kv_bytes)))
        for i in range(sets):
            table = torch.zeros(len(used), width, dtype=torch.int32, device="cuda")
            mine = scattered[i * sum(used) : (i + 1) * sum(used)].split(used)
            for row, blocks in zip(table, mine, strict=True):
                row[: len(blocks)] = blocks
            q = torch.randn(len(used), case.num_heads, case.head_dim, device="cuda").bfloat16()
            yield Inputs(q, k_cache, v_cache, table, seq_lens, max(case.lens), len(set(case.lens)) == 1)


def ours(inputs: list[Inputs]) -> list[Call]:
    """The kernel's calls, with one workspace for all, as a model's layers share it."""
    x = inputs[0]
    workspace = Workspace.allocate(x.q.shape[1], x.k_cache.shape[2], x.q.shape[2], x.q.dtype, x.q.device)
    return [
        functools.partial(
            paged_attention, x.q, x.k_cache, x.v_cache, x.block_table, x.seq_lens, out=torch.empty_like(x.q),
            workspace=workspace,
        )
        for x in inputs
    ]  # fmt: skip


@functools.cache
def variants() -> dict[str, dict[str, Peer]]:
    """Peer -> the ways to use it that are there; the fastest of them counts."""
    ways: dict[str, dict[str, Peer | None]] = {
        "fa3_paged": {"fa3_paged planned": peers.fa3_paged(True), "fa3_paged unplanned": peers.fa3_paged(False)},
        "vllm_triton": {"vllm_triton": peers.vllm_triton()},
        "sdpa_gather": {"sdpa_gather": peers.sdpa_gather},
    }
    ways |= {f"static_split_{n}": {f"static_split_{n}": static_split(n)} for n in SPLITS}
    return {peer: {name: bind for name, bind in found.items() if bind is not None} for peer, found in ways.items()}


def contenders(case: Case, inputs: list[Inputs]) -> dict[str, list[Call]]:
    """Everything that races in this case, name -> calls. Raises RuntimeError if one computes something else."""
    calls = {"ours": ours(inputs)}
    wanted = ["fa3_paged", "vllm_triton"]
    # Gathering needs room for a second copy of K and V, and equal lengths; the static split is the control of the skew.
    free, _ = torch.cuda.mem_get_info()
    if inputs[0].uniform and case.kv_bytes < free - 2**30:
        wanted.append("sdpa_gather")
    if not inputs[0].uniform:
        wanted += [f"static_split_{n}" for n in SPLITS]
    for peer in wanted:
        for name, bind in variants()[peer].items():
            calls[name] = [bind(x) for x in inputs]
    expected = calls["ours"][0]().float()
    for name, (first, *_) in calls.items():
        error = (first().float() - expected).norm() / expected.norm()
        if not error < 0.02:
            raise RuntimeError(f"{case.name}: {name} and ours differ by {error:.3g}, so their times say nothing")
    return calls


def measure(case: Case, pool: Pool, ceilings: dict[str, float]) -> Row:
    """Race one case. Values are TB/s of K and V, counted once; `ceilings` go with the peers."""
    torch.cuda.empty_cache()  # what the last case's graphs held is room for this one's gathered copy
    inputs = list(pool.inputs(case))
    timings = race(contenders(case, inputs))

    def speed(timing: Timing) -> float:
        return round(case.kv_bytes / timing.seconds / 1e12, 4)

    values = {}
    for peer, ways in variants().items():
        speeds = [speed(timings[name]) for name in ways if name in timings]
        if speeds:
            values[peer] = max(speeds)
    values |= {f"{name}_ceiling": round(value, 3) for name, value in ceilings.items()}
    return Row(case.name, "TB/s", "higher", speed(timings["ours"]), values, round(timings["ours"].spread, 4))


def run() -> list[Row]:
    """Every case whose K and V fit the GPU's memory, small ones first."""
    _, memory = torch.cuda.mem_get_info()
    room = memory - 6 * 2**30  # for the context, the contenders' own buffers and the graphs
    cases = sorted(
        (case for case in [*grid(), *others()] if case.kv_bytes <= room), key=lambda case: (case.kv_bytes, case.name)
    )
    ceilings = memory_ceilings()
    rows, pool = {}, None
    for case in tqdm(cases, desc="paged_attention"):
        bytes_wanted = max(case.kv_bytes, 2 * ROTATED_BYTES)
        if pool is None or pool.bytes < bytes_wanted:
            pool = None  # gives the memory back before more is taken
            torch.cuda.empty_cache()
            pool = Pool(max(bytes_wanted, min(4 * bytes_wanted, room // 4)) // 4)
        rows[case.name] = measure(case, pool, ceilings)
    return [rows[case.name] for case in [*grid(), *others()] if case.name in rows]


def summary(rows: list[Row]) -> str:
    """The figures that are quoted, computed from the rows."""
    main = [row for row in rows if row.case.startswith("grid")]
    lines = []
    for peer in ("fa3_paged", "vllm_triton", "sdpa_gather"):
        found = ratios(main, peer)
        if found:
            worst = min(found, key=lambda case: found[case])
            mean = geometric_mean(list(found.values()))
            lines.append(
                f"{peer}: geometric mean {mean:.3f}x over {len(found)} cases, worst {found[worst]:.3f}x ({worst})"
            )
    return "\n".join(lines)
