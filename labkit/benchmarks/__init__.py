"""Benchmarks of the kernels beside their peers, and the evidence they leave."""

from __future__ import annotations

import importlib
from pathlib import Path

import torch

NAMES = ("paged_attention", "flash_attention", "paged_prefill", "int4_matmul", "kv_cache", "engine", "vllm")


def run(names: list[str], json_path: Path | None = None) -> int:
    """Run the named benchmarks (all of them if none is named), print their rows, and write the evidence.

    json_path: where to write it; one benchmark a file. Gives 0. Raises ValueError for an unknown name or a file for
    several benchmarks, RuntimeError where there is no CUDA device.
    """
    unknown = [name for name in names if name not in NAMES]
    if unknown:
        raise ValueError(f"no benchmark is called {unknown[0]}; there are: {', '.join(NAMES)}")
    chosen = names or list(NAMES)
    if json_path is not None and len(chosen) > 1:
        raise ValueError(f"one evidence file holds one benchmark, and {len(chosen)} are to run: name one")
    if not torch.cuda.is_available():
        raise RuntimeError("benchmarks time kernels on a GPU, and there is no CUDA device here: see labkit doctor")
    for name in chosen:
        _run_one(name, json_path)
    return 0


def _run_one(name: str, json_path: Path | None) -> None:
    from labkit.benchmarks import evidence  # needs nothing but is of no use without a GPU

    benchmark = importlib.import_module(f"labkit.benchmarks.{name}")
    rows = benchmark.run()
    for row in rows:
        peers = "  ".join(f"{peer} {value:.3f}" for peer, value in row.peers.items())
        print(f"{row.case}: {row.variant or 'ours'} {row.ours:.3f} {row.unit} (spread {row.spread:.1%})  {peers}")
    print(benchmark.summary(rows))
    if json_path is not None:
        command = f"labkit bench {name} --json {json_path}"
        evidence.here(name, command, rows, benchmark.PACKAGES).write(json_path)
