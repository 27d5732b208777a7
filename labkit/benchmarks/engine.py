"""The engine beside vLLM, with graphs and without, at the shapes of Qwen3-8B and Qwen3-0.6B with random weights.

Both get the same prompts of 128 tokens, generate 128 greedily, have the same KV cache and no prefix caching. A decode
step is what the last 127 tokens cost: a run of 128 tokens less one of 1, over 127, the median of some rounds. Its floor
is the bytes that a step cannot avoid, all weights but the embedding and the K and V of the mean length, over what this
GPU's memory was measured to read. All engines are up at the same time and measured in turn; only one computes.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.benchmarks.ceilings import memory_ceilings
from labkit.benchmarks.evidence import Row, geometric_mean, ratios
from labkit.benchmarks.vllm import write_config
from labkit.benchmarks.vllm_engine import Batch, EngineProcess, EngineSpec
from labkit.engine import Engine, EngineConfig, ModelConfig, SamplingParams, Weights, random_weights
from labkit.models import QWEN3_0_6B, QWEN3_8B, ModelShape

PACKAGES = ("vllm",)
PROMPT, OUTPUT, LENGTH, BLOCK = 128, 128, 512, 16
CASES: dict[str, tuple[ModelShape, tuple[int, ...]]] = {
    "8B": (QWEN3_8B, (1, 16, 64, 128)),
    "0.6B": (QWEN3_0_6B, (1, 16, 64)),
}
BUDGET = 8192  # tokens of a step, for both
PEERS = ("ours", "vllm_graph", "own_eager", "vllm_eager")
ROUNDS, EAGER_ROUNDS = 5, 1  # an eager run of the 8B shape takes three seconds

Generate = Callable[[list[list[int]], int], Any]
"""(prompts, tokens to generate): runs them to the end."""


@dataclass(frozen=True)
class Measured:
    """Of one batch. step_ms: of a decode step. tokens_per_second: generated ones, prefill included. spread: of step_ms,
    its interquartile range over its median."""

    step_ms: float
    tokens_per_second: float
    spread: float


def num_blocks(batches: tuple[int, ...]) -> int:
    """KV blocks that hold the largest batch to its end, and a few more."""
    return max(batches) * -(-(PROMPT + OUTPUT) // BLOCK) + 64


def prompts_of(batch: int, vocab_size: int) -> list[list[int]]:
    """Random prompts, the same for everyone."""
    draw = random.Random(batch)
    return [[draw.randrange(vocab_size) for _ in range(PROMPT)] for _ in range(batch)]


def measure(generate: Generate, batch: int, vocab_size: int, rounds: int) -> Measured:
    """Time whole runs; each ends with its tokens on the host."""
    prompts = prompts_of(batch, vocab_size)

    def seconds(tokens: int) -> float:
        begin = time.perf_counter()
        generate(prompts, tokens)
        return time.perf_counter() - begin

    return measured(seconds, batch, rounds)


def measured(seconds: Callable[[int], float], batch: int, rounds: int) -> Measured:
    """From what it takes to generate a number of tokens by each of a batch."""
    seconds(8)
    steps, totals = [], []
    for _ in range(rounds):
        first, total = seconds(1), seconds(OUTPUT)
        steps.append((total - first) / (OUTPUT - 1) * 1e3)
        totals.append(total)
    middle = statistics.median(steps)
    low, _, high = statistics.quantiles(steps, n=4, method="inclusive") if rounds > 1 else steps * 3
    return Measured(middle, batch * OUTPUT / statistics.median(totals), (high - low) / middle)


def make_engine(config: ModelConfig, weights: Weights, batches: tuple[int, ...], graphs: str) -> Engine:
    """An engine for these batches, each with a graph of its own."""
    options = EngineConfig(
        device="cuda", block_size=BLOCK, num_blocks=num_blocks(batches), max_model_len=LENGTH, graphs=graphs,
        max_num_seqs=max(batches), max_num_batched_tokens=BUDGET, prefix_caching=False, capture_sizes=batches,
    )  # fmt: skip
    return Engine(config, weights, options)


def generator(engine: Engine) -> Generate:
    """The engine as `measure` runs it."""

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        return engine.generate(prompts, SamplingParams(max_tokens=tokens, ignore_eos=True))

    return generate


def samples(names: Iterable[str] = tuple(CASES)) -> Iterator[dict[str, Any]]:
    """Measure all that there is: {"case", "peer", "batch", and the fields of Measured}, as each comes.

    What fails gives {"case", "peer", "error"} and costs no other row. Without vLLM only ours is measured.
    """
    names = list(names)
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as stack:
        started = {}
        for spec in (s for name in names for s in vllm_specs(name, Path(scratch))) if _has_vllm() else ():
            started[spec.name] = EngineProcess(spec, Path(scratch, f"{spec.name}.log"))
            stack.callback(started[spec.name].stop)
        ready = {}
        for label, process in started.items():  # waiting for all: starting would disturb what is measured
            name, peer = label.split("-")
            try:
                process.wait()
                ready[name, peer] = process
            except Exception as error:
                yield {"case": name, "peer": peer, "error": str(error)}
        for name in names:
            try:
                yield from _samples_of(name, {peer: one for (case, peer), one in ready.items() if case == name})
            except Exception as error:
                yield {"case": name, "peer": "ours", "error": str(error)}
            gc.collect()
            torch.cuda.empty_cache()


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


def _samples_of(name: str, processes: Mapping[str, EngineProcess]) -> Iterator[dict[str, Any]]:
    """Of one shape: at each batch all contenders in turn. RuntimeError if graphs change our tokens."""
    shape, batches = CASES[name]
    config = ModelConfig.from_shape(shape)
    weights = random_weights(config, torch.bfloat16, "cuda")
    engines = {"ours": make_engine(config, weights, batches, "capture")}
    engines["own_eager"] = make_engine(config, weights, batches, "padded")
    check_tokens(engines, batches[:2], config.vocab_size)
    for peers, rounds in ((PEERS[:2], ROUNDS), (PEERS[2:], EAGER_ROUNDS)):
        for batch in batches:
            for peer in peers:
                if peer not in engines and peer not in processes:
                    continue
                try:
                    if peer in engines:
                        found = measure(generator(engines[peer]), batch, config.vocab_size, rounds)
                    else:
                        found = measured(_seconds(processes[peer], batch, config.vocab_size), batch, rounds)
                    yield {"case": name, "peer": peer, "batch": batch, **asdict(found)}
                except Exception as error:
                    yield {"case": name, "peer": peer, "batch": batch, "error": str(error)}


def _seconds(process: EngineProcess, batch: int, vocab_size: int) -> Callable[[int], float]:
    """What vLLM needs, on its own clock: the way of the tokens back to us is not counted."""
    prompts = tuple(map(tuple, prompts_of(batch, vocab_size)))
    return lambda tokens: process.measure(Batch(PROMPT, (tokens,) * batch, prompts))["seconds"]


def check_tokens(engines: dict[str, Engine], batches: tuple[int, ...], vocab_size: int) -> None:
    """Graphs and eager steps run the same kernels on the same padded batch: RuntimeError if one token differs."""
    for batch in batches:
        prompts = prompts_of(batch, vocab_size)
        graph, eager = (generator(engine)(prompts, 32) for engine in engines.values())
        if graph != eager:
            raise RuntimeError(
                f"batch {batch}: graphs and eager steps give different tokens, so their times say nothing"
            )


def vllm_specs(name: str, folder: Path) -> list[EngineSpec]:
    """vLLM with the batches' own graphs and without, with the KV cache, the budget and the lengths of ours."""
    shape, batches = CASES[name]
    config = ModelConfig.from_shape(shape)
    options: dict[str, Any] = {
        "dtype": "bfloat16", "load_format": "dummy", "max_model_len": LENGTH, "max_num_seqs": max(batches),
        "max_num_batched_tokens": BUDGET, "block_size": BLOCK, "gpu_memory_utilization": 0.1,
        "kv_cache_memory_bytes": num_blocks(batches) * config.kv_block_bytes(BLOCK, torch.bfloat16),
        "attention_backend": "FLASH_ATTN",
    }  # fmt: skip
    graphs = {"cudagraph_mode": "FULL_AND_PIECEWISE", "cudagraph_capture_sizes": list(batches)}
    model = str(write_config(shape, folder / f"{name} model"))
    return [
        EngineSpec(f"{name}-vllm_graph", model, {**options, "compilation_config": graphs}, probe=False),
        EngineSpec(f"{name}-vllm_eager", model, {**options, "enforce_eager": True}, probe=False),
    ]


def floor_ms(shape: ModelShape, batch: int, terabytes_per_second: float) -> float:
    """What reading the weights of a step and its K and V takes."""
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    kv = batch * (PROMPT + OUTPUT / 2) * shape.num_layers * shape.kv_layer_bytes()
    return (2 * (shape.weight_count - embedding) + kv) / terabytes_per_second / 1e9


def rows_of(found: Iterable[Mapping[str, Any]], read_ceiling: float) -> list[Row]:
    """Two rows a batch: the decode step, and the throughput of the whole run. What failed is left out.

    found: from `samples`. read_ceiling: TB/s.
    """
    by_row: dict[tuple[str, int], dict[str, Measured]] = {}
    for sample in found:
        if "error" not in sample:
            one = Measured(sample["step_ms"], sample["tokens_per_second"], sample["spread"])
            by_row.setdefault((sample["case"], sample["batch"]), {})[sample["peer"]] = one
    rows = []
    for (name, batch), its in by_row.items():
        if "ours" not in its:
            continue
        mine = its.pop("ours")
        steps = {peer: round(m.step_ms, 3) for peer, m in its.items()}
        steps["byte_floor"] = round(floor_ms(CASES[name][0], batch, read_ceiling), 3)
        speeds = {peer: round(m.tokens_per_second, 1) for peer, m in its.items()}
        spread, case = round(mine.spread, 4), f"{name}, batch {batch}, {PROMPT} + {OUTPUT} tokens"
        rows.append(Row(f"decode step: {case}", "ms", "lower", round(mine.step_ms, 3), steps, spread))
        rows.append(Row(f"throughput: {case}", "tokens/s", "higher", round(mine.tokens_per_second, 1), speeds, spread))
    return rows


def run() -> list[Row]:
    """Both shapes beside vLLM. RuntimeError, with the reason, if anything could not be measured."""
    ceiling = memory_ceilings()["read"]
    found = list(samples())
    failed = [sample for sample in found if "error" in sample]
    if failed:
        raise RuntimeError(f"{failed[0]['case']}, {failed[0]['peer']} failed: {failed[0]['error']}")
    return rows_of(found, ceiling)


def summary(rows: list[Row]) -> str:
    """The figures that are quoted, computed from the rows."""
    lines = []
    for kind in ("decode step", "throughput"):
        found = ratios([row for row in rows if row.case.startswith(kind)], "vllm_graph")
        if found:
            worst = min(found, key=lambda case: found[case])
            mean = geometric_mean(list(found.values()))
            lines.append(
                f"{kind} against vLLM with graphs: geometric mean {mean:.3f}x, worst {found[worst]:.3f}x ({worst})"
            )
    return "\n".join(lines)
