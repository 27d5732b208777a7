"""The floor of an operation: the time below which it cannot get, from its bytes, its FLOPs and this device's ceilings.

An operation must move its bytes and do its arithmetic, so its time is at least the larger of bytes / bandwidth and
FLOPs / peak (Williams, Waterman, Patterson: Roofline, CACM 52(4), 2009). Ceilings are measured, not taken from a data
sheet, once for each device and driver, and kept in the cache directory.
"""

from __future__ import annotations

import functools
import json
import os
import platform
import re
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from labkit import device


@dataclass(frozen=True)
class Work:
    """What an operation must at least do: bytes to and from memory, each counted once, and FLOPs."""

    name: str
    bytes: int
    flops: int

    @property
    def intensity(self) -> float:
        """FLOPs a byte."""
        return self.flops / self.bytes


def copy_work(elements: int, dtype_bytes: int = 2) -> Work:
    """Reading and writing each element once."""
    return Work("copy", 2 * elements * dtype_bytes, 0)


def matmul_work(m: int, n: int, k: int, dtype_bytes: int = 2) -> Work:
    """(m, k) times (k, n): both read and the product written once, a multiply and an add for each of m * n * k."""
    return Work("matmul", dtype_bytes * (m * k + k * n + m * n), 2 * m * n * k)


def decode_work(
    seq_lens: Sequence[int],
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    dtype_bytes: int = 2,
    block_size: int | None = None,
) -> Work:
    """Attention of one new token a sequence over seq_lens tokens of KV cache.

    K and V of every token are read once, q once, o written once, and with pages (block_size) four bytes of block table
    for each block. Query heads that share a KV head share its bytes, so the intensity is about their number.
    """
    tokens, batch = sum(seq_lens), len(seq_lens)
    kv = 2 * num_kv_heads * head_dim * dtype_bytes * tokens
    table = sum(4 * -(-n // block_size) for n in seq_lens) if block_size else 0
    return Work(
        "decode", kv + 2 * batch * num_heads * head_dim * dtype_bytes + table, 4 * num_heads * head_dim * tokens
    )


def prefill_work(
    batch: int,
    seq_len: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    *,
    causal: bool = True,
    dtype_bytes: int = 2,
) -> Work:
    """Attention of all tokens of a prompt over one another: q, k, v read once, o written once, no score ever stored."""
    pairs = seq_len * (seq_len + 1) // 2 if causal else seq_len * seq_len
    moved = dtype_bytes * batch * seq_len * head_dim * (2 * num_heads + 2 * num_kv_heads)
    return Work("prefill", moved, 4 * batch * num_heads * head_dim * pairs)


@dataclass(frozen=True)
class Ceilings:
    """What this device reaches: read and copy in bytes a second (a copy's bytes counted twice), and FLOP/s by dtype."""

    device: str
    driver: str
    read: float
    copy: float
    flops: dict[str, float]


@dataclass(frozen=True)
class Floor:
    """The least time of an operation in seconds, and what sets it: "memory" or "compute"."""

    seconds: float
    bound: str


def floor(work: Work, on: Ceilings, dtype: str = "float16") -> Floor:
    """The floor of `work` on a device. dtype: whose peak counts, "float16", "bfloat16" or "float32".

    An operation that mostly reads is held to the faster of the two bandwidths. ValueError if the peak of this dtype was
    not measured.
    """
    if work.flops and dtype not in on.flops:
        raise ValueError(f"dtype: no peak of {dtype!r} was measured on {on.device}, only {', '.join(on.flops)}")
    memory = work.bytes / max(on.read, on.copy)
    compute = work.flops / on.flops[dtype] if work.flops else 0.0
    return Floor(max(memory, compute), "memory" if memory >= compute else "compute")


def ceilings(*, refresh: bool = False) -> Ceilings:
    """The ceilings of this device: from the cache, or measured now (about 2 s) and cached.

    The file is XDG_CACHE_HOME/inference-camp/ceilings-<device>-<driver>.json; refresh=True measures again.
    """
    here = _identity()
    file = _cache_folder() / f"ceilings-{_slug(here[0])}-{_slug(here[1])}.json"
    if not refresh and file.exists():
        try:
            return Ceilings(**json.loads(file.read_text(encoding="utf-8")))
        except (ValueError, TypeError):
            pass  # half written or of an older version: measured anew
    measured = _measure(*here)
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_suffix(f".{os.getpid()}")
    scratch.write_text(json.dumps(asdict(measured), indent=1), encoding="utf-8")
    scratch.replace(file)
    return measured


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inference-camp"


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


@functools.cache
def _identity() -> tuple[str, str]:
    """(device, driver); on a CPU its model and number of threads, and torch's version."""
    if device.tier() != "cuda":
        return f"{_cpu_model()} {torch.get_num_threads()} threads", f"torch {torch.__version__}"
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = f"cuda {torch.version.cuda}"
    return torch.cuda.get_device_name(), driver


def _cpu_model() -> str:
    try:
        found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        found = None
    return found[1] if found else platform.processor() or platform.machine()


def _measure(name: str, driver: str) -> Ceilings:
    where, cuda = device.name(), device.tier() == "cuda"
    read, copy = _bandwidths((1 << 28) if cuda else (1 << 25), where)  # 1 GiB, 128 MiB: several times any cache
    sides = (4096, 8192) if cuda else (512, 1024)  # the larger one may be throttled, the smaller one too small
    dtypes = [torch.float16, torch.bfloat16, torch.float32] if cuda else [torch.float32]
    flops = {str(t).removeprefix("torch."): max(_matmul_flops(n, t, where) for n in sides) for t in dtypes}
    return Ceilings(name, driver, read, copy, flops)


def _bandwidths(elements: int, where: str) -> tuple[float, float]:
    """Bytes a second of a read and of a copy of this many fp32 numbers."""
    x = torch.ones(elements, device=where)
    y = torch.empty_like(x)
    size = x.numel() * x.element_size()
    return size / _seconds(lambda: x.sum()), 2 * size / _seconds(lambda: y.copy_(x))


def _matmul_flops(side: int, dtype: torch.dtype, where: str) -> float:
    a, b = (torch.randn(side, side, device=where, dtype=dtype) for _ in range(2))  # random: zeros run faster
    return 2 * side**3 / _seconds(lambda: a @ b)


def _seconds(call: Callable[[], object], rounds: int = 9) -> float:
    """The fastest of some calls: a ceiling is what the device can do at best; good to about 2 %."""
    call()
    return min(_once(call) for _ in range(rounds))


def _once(call: Callable[[], object]) -> float:
    if device.tier() != "cuda":
        began = time.perf_counter()
        call()
        return time.perf_counter() - began
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3
