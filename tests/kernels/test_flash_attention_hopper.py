"""Hopper's kernels: compiled wherever Triton is, and compared with the oracle on a Hopper GPU."""

import json
import os
import random
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

from kernels import flash_attention_hopper as hopper
from kernels import variants
from kernels.flash_attention import flash_attention
from tests.kernels.test_flash_attention import check, make, pack

on_hopper = pytest.mark.skipif(
    not (torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9), reason="needs a Hopper GPU"
)


@pytest.mark.parametrize("arguments", ["dense 128 128 2", "dense 64 64 3", "paged 128 128 4 16", "paged 64 128 1 256"])
def test_they_compile_for_sm_90_without_a_gpu(arguments):
    script = Path(__file__).parent / "compile_hopper.py"
    env = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, str(script), *arguments.split()]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    counts = json.loads(done.stdout)
    assert counts["wgmma"] > 0 and counts["tma"] > 0, f"no tensor-core or TMA instructions: {counts}"
    assert counts["setmaxnreg"] > 0, "the copying warp must hand its registers over"
    assert counts["shared"] <= 227 * 1024, f"{counts['shared']} bytes of shared memory do not fit an SM"


def test_no_gpu_is_a_reason_and_a_demand_for_it_is_refused(device):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU here")
    q, k, v = make(device, torch.float16)
    assert "Hopper" in hopper.unsupported(q, k, False)
    with pytest.raises(ValueError, match=r"variant: 'hopper' cannot run here: it needs a Hopper GPU"):
        flash_attention(q, k, v, variant="hopper")


def test_what_it_cannot_do_is_said_once(monkeypatch):
    monkeypatch.setattr(variants, "_is_hopper", lambda device: True)
    variants._warn_once.cache_clear()
    q = torch.empty(0)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for _ in range(2):
            assert not variants.takes_hopper("flash_attention", None, q, lambda: ("it has no packed sequences", True))
    assert [str(w.message) for w in seen] == [
        "flash_attention: it has no packed sequences, so the portable kernel runs instead of Hopper's"
    ]


@pytest.mark.parametrize("tiles_m", [1, 2, 3, 8, 31])
@pytest.mark.parametrize("causal", [False, True])
def test_every_tile_of_every_head_is_somebodys_work_once(tiles_m, causal):
    """The kernel's arithmetic, in Python: units of a head are a range of its tiles."""
    units = (tiles_m + 1) // 2 if causal else tiles_m
    seen = []
    for first in range(units):
        stop, step = (tiles_m - first, max(tiles_m - 1 - 2 * first, 1)) if causal else (first + 1, 1)
        seen += range(first, stop, step)
    assert sorted(seen) == list(range(tiles_m))


class Barrier:
    """An mbarrier: a phase ends when `count` have arrived; waiting for a parity passes if that phase has ended."""

    def __init__(self, count):
        self.count, self.pending, self.phase = count, count, 0

    def arrive(self):
        self.pending -= 1
        assert self.pending >= 0, "more arrivals than a phase takes"
        if self.pending == 0:
            self.phase, self.pending = self.phase + 1, self.count

    def passes(self, parity):
        return self.phase & 1 != parity


class Pipeline:
    """The kernel's copying warp and computing groups as coroutines, with its barriers and its arithmetic of slots."""

    def __init__(self, groups, stages, tiles, ping_pong):
        self.groups, self.stages, self.tiles, self.ping_pong = groups, stages, tiles, ping_pong
        self.q_full, self.q_free, self.turns = ([Barrier(1) for _ in range(groups)] for _ in range(3))
        self.free = [Barrier(groups) for _ in range(stages)]
        self.full = {ring: [Barrier(1) for _ in range(stages)] for ring in "kv"}
        self.slots = {ring: [None] * stages for ring in "kv"}
        self.readers = {ring: [0] * stages for ring in "kv"}
        if ping_pong:
            self.turns[0].arrive()

    def load(self, ring, count, step, label):
        while not self.free[step % self.stages].passes((step // self.stages + 1) & 1):
            yield
        yield
        slot = count % self.stages
        assert not self.readers[ring][slot], f"{ring} tile {count} overwrites a slot that a group still reads"
        self.slots[ring][slot] = label
        self.full[ring][slot].arrive()

    def copying(self):
        count = 0
        for turn, num_tiles in enumerate(self.tiles):
            for group in range(self.groups):
                while not self.q_free[group].passes((turn + 1) & 1):
                    yield
                self.q_full[group].arrive()
                if group == 0:
                    yield from self.load("k", count, count, (turn, 0))
            for i in range(num_tiles - 1):
                yield from self.load("k", count + 1, count + 1, (turn, i + 1))
                yield from self.load("v", count, count + 1, (turn, i))
                count += 1
            yield from self.load("v", count, count + 1, (turn, num_tiles - 1))
            count += 1

    def read(self, ring, count, label):
        slot = count % self.stages
        while not self.full[ring][slot].passes((count // self.stages) & 1):
            yield
        assert self.slots[ring][slot] == label, f"{ring} slot {slot} holds {self.slots[ring][slot]}, not {label}"
        self.readers[ring][slot] += 1

    def computing(self, group):
        count = 0
        for turn, num_tiles in enumerate(self.tiles):
            while not self.q_full[group].passes(turn & 1):
                yield
            yield from self.read("k", count, (turn, 0))
            yield
            self.readers["k"][count % self.stages] -= 1
            self.free[count % self.stages].arrive()
            for i in range(num_tiles - 1):
                while self.ping_pong and not self.turns[group].passes((count - turn) & 1):
                    yield
                yield from self.read("k", count + 1, (turn, i + 1))
                yield from self.read("v", count, (turn, i))
                if self.ping_pong:
                    self.turns[(group + 1) % self.groups].arrive()
                yield
                self.readers["k"][(count + 1) % self.stages] -= 1
                self.readers["v"][count % self.stages] -= 1
                self.free[(count + 1) % self.stages].arrive()
                count += 1
            self.q_free[group].arrive()
            yield from self.read("v", count, (turn, num_tiles - 1))
            yield
            self.readers["v"][count % self.stages] -= 1
            count += 1


def test_no_order_of_events_makes_the_pipeline_stall_or_overwrite_what_is_read():
    for seed in range(300):
        draw = random.Random(seed)
        tiles = [draw.randint(1, 6) for _ in range(draw.randint(1, 6))]
        pipeline = Pipeline(draw.choice([2, 3]), draw.choice([2, 3, 4]), tiles, draw.random() < 0.5)
        running = [pipeline.copying(), *(pipeline.computing(g) for g in range(pipeline.groups))]
        speeds = {id(worker): draw.random() + 0.05 for worker in running}
        for _ in range(100_000):
            worker = draw.choices(running, [speeds[id(w)] for w in running])[0]
            try:
                next(worker)
            except StopIteration:
                running.remove(worker)
            if not running:
                break
        assert not running, f"seed {seed}: {len(running)} workers wait for each other"


@on_hopper
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_every_head_dim_and_type(device, dtype, head_dim, causal):
    check(*make(device, dtype, 700, 700, 2, 4, 2, head_dim), causal=causal, variant="hopper")


@on_hopper
@pytest.mark.parametrize("q_len, k_len", [(1, 1), (1, 500), (300, 1000), (1000, 300), (128, 129), (2000, 2000)])
def test_the_causal_diagonal_ends_in_the_bottom_right_corner(device, q_len, k_len):
    check(*make(device, torch.float16, q_len, k_len, 3, 8, 8, 128), causal=True, variant="hopper")


@on_hopper
def test_heads_before_tokens_passes_as_a_view(device):
    q, k, v = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in make(device, torch.float16, head_dim=128))
    check(q, k, v, causal=True, variant="hopper")


@on_hopper
def test_packed_sequences_fall_back_to_the_portable_kernel_and_say_so(device):
    variants._warn_once.cache_clear()
    q, k, v, cu_q, cu_k = pack(device, torch.float16, [100, 200], [100, 200])
    with pytest.warns(UserWarning, match="it has no packed sequences"):
        flash_attention(q, k, v, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
