"""The FlashAttention kernels beside their peers, with equal lengths and packed sequences.

TFLOP/s counts the two matrix products of the pairs that the mask leaves, 4 * pairs * head_dim a head; for a causal mask
that is half of the square, by convention.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from tqdm import tqdm

from kernels import flash_attention_hopper
from kernels.flash_attention import flash_attention
from labkit.benchmarks.evidence import Row, geometric_mean
from labkit.benchmarks.flash_peers import PEERS, Inputs
from labkit.benchmarks.timing import Call, Timing, race

PACKAGES = ("vllm",)
ROTATED_BYTES = 512 * 2**20  # of all input sets together: over eight times an H200's L2


@dataclass(frozen=True)
class Case:
    """One row. q_lens, k_lens: of each sequence. peers: who races in it, where installed and able."""

    group: str
    q_lens: tuple[int, ...]
    k_lens: tuple[int, ...]
    causal: bool
    num_heads: int = 16
    num_kv_heads: int = 16
    head_dim: int = 128
    peers: tuple[str, ...] = ("fa2", "cudnn", "fa3")

    @property
    def name(self) -> str:
        equal = len({*self.q_lens}) == 1 == len({*self.k_lens})
        lens = f"batch {len(self.q_lens)} x {self.q_lens[0]}" if equal else f"{len(self.q_lens)} x {self._spans()}"
        over = f" over {max(self.k_lens)}" if self.k_lens != self.q_lens else ""
        heads = f"{self.num_heads}/{self.num_kv_heads} heads of {self.head_dim}"
        return f"{self.group}: {lens}{over}, {heads}, {'causal' if self.causal else 'full'}"

    def _spans(self) -> str:
        return f"{min(self.q_lens)} to {max(self.q_lens)}"

    @property
    def packed(self) -> bool:
        return self.group in ("packed", "paged")

    @property
    def flops(self) -> float:
        halved = 0.5 if self.causal else 0.0
        pairs = sum(m * n - halved * m * m for m, n in zip(self.q_lens, self.k_lens, strict=True))
        return 4 * pairs * self.num_heads * self.head_dim

    @property
    def tensor_bytes(self) -> int:
        rows = 2 * sum(self.q_lens) * self.num_heads + 2 * sum(self.k_lens) * self.num_kv_heads
        return 2 * rows * self.head_dim


def dense() -> list[Case]:
    """16k tokens a batch, as in the FlashAttention papers; then few heads' worth of work, grouped heads, a prefix."""
    cases = []
    for head_dim, num_heads, lens in (
        (128, 16, (512, 1024, 2048, 4096, 8192, 16384)),
        (64, 32, (512, 1024, 4096, 16384)),
        (256, 8, (512, 2048, 8192)),
        (96, 16, (512, 4096)),
        (80, 16, (512, 4096)),
    ):
        for n in lens:
            goal = (head_dim, n) in ((128, 4096), (128, 16384), (64, 4096))
            peers = ("fa2", "cudnn", "flex", "fa3") if goal else ("fa2", "cudnn", "fa3")
            batch = 16384 // n
            shape = ((n,) * batch, (n,) * batch)
            cases += [Case("dense", *shape, causal, num_heads, num_heads, head_dim, peers) for causal in (False, True)]
    for batch, n in ((1, 128), (32, 128), (8, 256), (1, 512), (1, 2048)):
        cases += [Case("short", (n,) * batch, (n,) * batch, causal) for causal in (False, True)]
    cases += [Case("GQA", (n,) * b, (n,) * b, True, h, 8) for b, n, h in ((4, 4096, 32), (1, 8192, 64))]
    return [*cases, Case("prefix", (1024,) * 4, (8192,) * 4, True, peers=("fa3",))]


def packed() -> list[Case]:
    """Sequences of different lengths: log-normal ones of 16k tokens, many short ones, one long among short ones."""
    draw = random.Random(0)
    mixed: list[int] = []
    while sum(mixed) < 16384:
        mixed.append(min(max(16, int(draw.lognormvariate(6.5, 1.2))), 8192))
    batches = (mixed, [draw.randint(70, 512) for _ in range(64)], [8192, *[256] * 32])
    return [
        Case("packed", tuple(lens), tuple(lens), causal, peers=("fa3",)) for lens in batches for causal in (False, True)
    ]


def make(case: Case) -> list[Inputs]:
    """Random input sets, enough that together they exceed the L2 cache several times."""
    sets = []
    for _ in range(max(1, -(-ROTATED_BYTES // case.tensor_bytes))):
        shapes = ((case.q_lens, case.num_heads), (case.k_lens, case.num_kv_heads), (case.k_lens, case.num_kv_heads))
        q, k, v = (torch.randn(sum(n), h, case.head_dim, device="cuda").bfloat16() for n, h in shapes)
        ends = {}
        if case.packed:
            for name, lens in (("cu_q", case.q_lens), ("cu_k", case.k_lens)):
                ends[name] = torch.tensor([0, *lens]).cumsum(0).to("cuda", torch.int32)
        else:
            q, k, v = (t.unflatten(0, (len(case.q_lens), -1)) for t in (q, k, v))
        sets.append(Inputs(q, k, v, case.causal, max(case.q_lens), max(case.k_lens), **ends))
    return sets


def ours(x: Inputs, variant: str) -> Call:
    """A call of one of our kernels."""
    out = torch.empty_like(x.q)

    def call() -> torch.Tensor:
        flash_attention(
            x.q, x.k, x.v, causal=x.causal, cu_seqlens_q=x.cu_q, cu_seqlens_k=x.cu_k, out=out, variant=variant
        )
        return out

    return call


def contenders(case: Case, sets: Sequence[Inputs]) -> dict[str, list[Call]]:
    """Everything that races in this case, name -> calls. Raises RuntimeError if one computes something else."""
    binds: dict[str, Callable[[Inputs], Call]] = {"tl": lambda x: ours(x, "tl")}
    if flash_attention_hopper.unsupported(sets[0].q, sets[0].k, case.packed) is None:
        binds["hopper"] = lambda x: ours(x, "hopper")
    binds |= {name: PEERS[name] for name in case.peers}
    calls: dict[str, list[Call]] = {}
    expected = ours(sets[0], "tl")()
    for name, bind in binds.items():
        try:
            mine = [bind(x) for x in sets]
            got = mine[0]()
        except (ImportError, RuntimeError, NotImplementedError):
            continue  # not installed, or not made for this shape
        if not torch.allclose(got.float(), expected.float(), atol=1e-2, rtol=2e-2):
            raise RuntimeError(f"{case.name}: {name} and tl disagree, so their times say nothing")
        calls[name] = mine
    return calls


def measure(case: Case) -> list[Row]:
    """Race one case: a row for each of our kernels that can run it, with the same peers."""
    return rows_of(case, race(contenders(case, make(case))))


def rows_of(case: Case, timings: dict[str, Timing]) -> list[Row]:
    """A row for each of our kernels among the timings."""

    def speed(timing: Timing) -> float:
        return round(case.flops / timing.seconds / 1e12, 2)

    values = {name: speed(timings[name]) for name in case.peers if name in timings}
    rows = []
    for variant in ("tl", "hopper"):
        if variant in timings:
            spread = round(timings[variant].spread, 4)
            row = Row(case.name, "TFLOP/s", "higher", speed(timings[variant]), values, spread)
            rows.append(replace(row, variant=variant))
    return rows


def run() -> list[Row]:
    """Every case."""
    rows = []
    for case in tqdm([*dense(), *packed()], desc="flash_attention"):
        rows += measure(case)
        torch.cuda.empty_cache()
    return rows


def summary(rows: list[Row]) -> str:
    """The figures that are quoted, computed from the rows."""
    lines = []
    for variant in ("tl", "hopper"):
        for peer in dict.fromkeys(name for row in rows for name in row.peers):
            found = {row.case: row.ratio(peer) for row in rows if row.variant == variant and peer in row.peers}
            if found:
                worst = min(found, key=lambda case: found[case])
                mean = geometric_mean(list(found.values()))
                lines.append(
                    f"{variant} to {peer}: geometric mean {mean:.3f}x over {len(found)} cases, "
                    f"worst {found[worst]:.3f}x ({worst})"
                )
    return "\n".join(lines)
