"""Logs, counters and timelines that the checks of lab 5 make up: like vLLM's own, with numbers of their own."""

from __future__ import annotations

import random

from labkit.serve.recording import Timeline

HEAD = "(EngineCore pid={pid}) INFO 11-30 07:53:{second:02d}"


def cpu_log(tokens: int = 32768, concurrency: float = 32.0, length: int = 1024, block_size: int | None = None) -> str:
    """What vLLM 0.32 writes on a CPU, shortened: it names no backend, and a block size only where one was asked for."""
    asked = "" if block_size is None else f", 'block_size': {block_size}"
    return (
        f"(APIServer pid=9) INFO 11-30 07:53:35 [api_utils.py:286] non-default args: {{'port': 8123{asked}}}\n"
        f"(APIServer pid=9) INFO 11-30 07:53:44 [model.py:2152] Using max model len {length}\n"
        f"{HEAD.format(pid=95, second=51)} [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        f"model='/models/tiny', dtype=torch.bfloat16, max_seq_len={length}, enforce_eager=True, "
        "enable_prefix_caching=True, compilation_config={'cudagraph_mode': <CUDAGraphMode.NONE: 0>}\n"
        f"{HEAD.format(pid=95, second=53)} [cpu_worker.py:260] Explicitly set (0.06/15.84) GiB for KV cache.\n"
        f"{HEAD.format(pid=95, second=53)} [kv_cache_utils.py:2327] CPU KV cache size: {tokens:,} tokens, "
        f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x\n"
        "(APIServer pid=9) INFO 11-30 07:53:53 [launcher.py:186] Available routes are:\n"
    )


def gpu_log(
    tokens: int = 789696, concurrency: float = 19.28, length: int = 40960, backend: str = "FLASH_ATTN",
    asked: int | None = None,
) -> str:  # fmt: skip
    """What it writes on a GPU, shortened; for a hybrid model it says which block size it chose, whatever was asked."""
    return (
        f"(APIServer pid=3) INFO 11-30 07:52:58 [api_utils.py:286] non-default args: {{'block_size': {asked}}}\n"
        * bool(asked)
        + f"{HEAD.format(pid=7, second=1)} [core.py:133] Initializing a V1 LLM engine (v0.32.0) with config: "
        f"model='/models/hybrid', dtype=torch.bfloat16, max_seq_len={length}, enforce_eager=False, "
        "enable_prefix_caching=True, "
        "compilation_config={'cudagraph_mode': <CUDAGraphMode.FULL_AND_PIECEWISE: (2, 1)>}\n"
        f"{HEAD.format(pid=7, second=2)} [interface.py:1097] Setting attention block size to 400 tokens to ensure that "
        "attention page size is >= mamba page size.\n"
        f"{HEAD.format(pid=7, second=9)} [cuda.py:507] Using {backend} attention backend out of potential backends: "
        "['FLASH_ATTN', 'TRITON_ATTN'].\n"
        f"{HEAD.format(pid=7, second=20)} [gpu_worker.py:759] Available KV cache memory: 108.45 GiB\n"
        f"{HEAD.format(pid=7, second=20)} [kv_cache_utils.py:2327] GPU KV cache size: {tokens:,} tokens, "
        f"Maximum concurrency for {length:,} tokens per request: {concurrency:.2f}x\n"
        f"{HEAD.format(pid=7, second=41)} [gpu_model_runner.py:6582] Graph capturing finished in 12 secs, "
        "took 0.61 GiB\n"
    )


def scrape(values: dict[str, list[float]]) -> str:
    """The text of /metrics: each counter with a line for each engine, and what else stands there."""
    lines = []
    for name, engines in values.items():
        lines += [
            f"# HELP {name.removesuffix('_total')} What it counts, with {name} 77.0 in its text.",
            f"# TYPE {name} counter",
        ]
        lines += [f'{name}{{engine="{i}",model_name="tiny"}} {value}' for i, value in enumerate(engines)]
        lines += [f'{name.removesuffix("_total")}_created{{engine="0",model_name="tiny"}} 1.796e+09']
    return "\n".join(lines) + "\n"


def timelines(count: int = 40, seed: int = 0) -> list[Timeline]:
    """Random requests; every eighth gets no answer, one has a single token."""
    rng = random.Random(seed)
    found = []
    for i in range(count):
        sent = 0.1 * i + rng.uniform(0, 0.01)
        at = sent + rng.expovariate(1 / 0.08)
        times = []
        for _ in range(1 if i == 3 else rng.randint(2, 30)):
            times.append(at)
            at += rng.expovariate(1 / 0.02)
        found.append(Timeline(i, 0.1 * i, sent, () if i % 8 == 7 else tuple(times), 32))
    return found
