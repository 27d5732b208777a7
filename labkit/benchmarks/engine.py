"""The engine beside vLLM, with graphs and without, at the shapes of Qwen3-8B and Qwen3-0.6B with random weights.

Both get the same prompts of 128 tokens, generate 128 greedily, have the same KV cache and no prefix caching. A decode
step is what the last 127 tokens cost: a run of 128 tokens less one of 1, over 127, the median of some rounds. Its floor
is the bytes that a step cannot avoid, all weights but the embedding and the K and V of the mean length, over what this
GPU's memory was measured to read.
"""

from __future__ import annotations

import gc
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from labkit.benchmarks.ceilings import memory_ceilings
from labkit.benchmarks.evidence import Row, geometric_mean, ratios
from labkit.engine import Engine, EngineConfig, ModelConfig, SamplingParams, Weights, random_weights
from labkit.models import QWEN3_0_6B, QWEN3_8B, ModelShape

PACKAGES = ("vllm",)
PROMPT, OUTPUT, LENGTH, BLOCK = 128, 128, 512, 16
CASES: dict[str, tuple[ModelShape, tuple[int, ...]]] = {
    "8B": (QWEN3_8B, (1, 16, 64, 128)),
    "0.6B": (QWEN3_0_6B, (1, 16, 64)),
}
BUDGET = 8192  # tokens of a step, for both

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

    seconds(8)
    steps, totals = [], []
    for _ in range(rounds):
        first, total = seconds(1), seconds(OUTPUT)
        steps.append((total - first) / (OUTPUT - 1) * 1e3)
        totals.append(total)
    low, middle, high = statistics.quantiles(steps, n=4, method="inclusive")
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


def ours(name: str, rounds: int = 5, eager_rounds: int = 3) -> dict[str, dict[int, Measured]]:
    """ "ours" with graphs and "own_eager" without, at the same padded batch. RuntimeError if their tokens differ."""
    shape, batches = CASES[name]
    config = ModelConfig.from_shape(shape)
    weights = random_weights(config, torch.bfloat16, "cuda")
    engines = {"ours": make_engine(config, weights, batches, "capture")}
    engines["own_eager"] = make_engine(config, weights, batches, "padded")
    check_tokens(engines, batches[:2], config.vocab_size)
    return {
        peer: {
            batch: measure(generator(engine), batch, config.vocab_size, rounds if peer == "ours" else eager_rounds)
            for batch in batches
        }
        for peer, engine in engines.items()
    }


def check_tokens(engines: dict[str, Engine], batches: tuple[int, ...], vocab_size: int) -> None:
    """Graphs and eager steps run the same kernels on the same padded batch: RuntimeError if one token differs."""
    for batch in batches:
        prompts = prompts_of(batch, vocab_size)
        graph, eager = (generator(engine)(prompts, 32) for engine in engines.values())
        if graph != eager:
            raise RuntimeError(
                f"batch {batch}: graphs and eager steps give different tokens, so their times say nothing"
            )


def vllm(name: str, eager: bool, rounds: int) -> dict[int, Measured]:
    """vLLM's times, from a process of its own; empty where it is not installed. RuntimeError if it fails."""
    shape, _ = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config_json(shape)), encoding="utf-8")
        command = [sys.executable, "-m", "labkit.benchmarks.engine_vllm", folder, name, str(int(eager)), str(rounds)]
        child = subprocess.run(command, capture_output=True, text=True, check=False)
    if child.returncode:
        raise RuntimeError(f"vLLM failed: {child.stderr[-2000:]}")
    last = child.stdout.strip().splitlines()[-1]
    return {int(batch): Measured(**values) for batch, values in json.loads(last).items()}


def config_json(shape: ModelShape) -> dict[str, Any]:
    """A config.json of a Qwen3 model of this shape, as transformers and vLLM read it."""
    return {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size, "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers, "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim, "hidden_act": "silu",
        "max_position_embeddings": shape.max_position, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "bos_token_id": 0,
        "eos_token_id": 1, "attention_bias": False, "tie_word_embeddings": shape.tied_embeddings, "dtype": "bfloat16",
    }  # fmt: skip


def floor_ms(shape: ModelShape, batch: int, terabytes_per_second: float) -> float:
    """What reading the weights of a step and its K and V takes."""
    embedding = 0 if shape.tied_embeddings else shape.vocab_size * shape.hidden_size
    kv = batch * (PROMPT + OUTPUT / 2) * shape.num_layers * shape.kv_layer_bytes()
    return (2 * (shape.weight_count - embedding) + kv) / terabytes_per_second / 1e9


def rows_of(name: str, measured: dict[str, dict[int, Measured]], read_ceiling: float) -> list[Row]:
    """Two rows a batch: the decode step, and the throughput of the whole run."""
    shape, batches = CASES[name]
    rows = []
    for batch in batches:
        its = {peer: found[batch] for peer, found in measured.items()}
        mine = its.pop("ours")
        steps = {peer: round(m.step_ms, 3) for peer, m in its.items()}
        steps["byte_floor"] = round(floor_ms(shape, batch, read_ceiling), 3)
        speeds = {peer: round(m.tokens_per_second, 1) for peer, m in its.items()}
        spread, case = round(mine.spread, 4), f"{name}, batch {batch}, {PROMPT} + {OUTPUT} tokens"
        rows.append(Row(f"decode step: {case}", "ms", "lower", round(mine.step_ms, 3), steps, spread))
        rows.append(Row(f"throughput: {case}", "tokens/s", "higher", round(mine.tokens_per_second, 1), speeds, spread))
    return rows


def run() -> list[Row]:
    """Both shapes, ours first, then vLLM in processes of its own."""
    ceiling = memory_ceilings()["read"]
    rows = []
    for name in CASES:
        measured = ours(name)
        gc.collect()
        torch.cuda.empty_cache()
        for peer, eager, rounds in (("vllm_graph", False, 5), ("vllm_eager", True, 2)):
            found = vllm(name, eager, rounds)
            if found:
                measured[peer] = found
        rows += rows_of(name, measured, ceiling)
    return rows


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
