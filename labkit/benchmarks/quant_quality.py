"""What each way to quantize SmolLM2-135M costs it, on a CPU: perplexity, KL to the unquantized model, top-1 agreement.

    python -m labkit.benchmarks.quant_quality --json quant_quality.cpu.json

Takes an hour or two on two cores. The file is written after every recipe, and a run that is started again with the same
file goes on with what is missing there. `--only TEXT` runs the recipes whose name holds the text; `--checkpoint
NAME=FOLDER` adds one that another program wrote, in a format that `labkit.quant` reads; `--text NAME=FILE` measures on
a text that does not ship as well.

Eight windows of 512 tokens of each text, in bf16, without a token at the start; calibration is on 8,192 tokens of other
books. Embeddings and output head stay as they are. No GPU is used or timed.

The unquantized model was itself dequantized from GGUF's Q4_1, whose grids of 32 weights Q4_K can take over: what that
one costs here is not what it costs elsewhere.
"""

from __future__ import annotations

import argparse
import copy
import datetime
import importlib.metadata
import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from labkit.benchmarks.evidence import Evidence, Row, load
from labkit.models import load_model
from labkit.quant.awq import prepare_awq
from labkit.quant.blocks import quantize_q4_0, quantize_q4_k
from labkit.quant.checkpoints import dequantize_into
from labkit.quant.clip import clamp_sigmas, search_clip
from labkit.quant.floats import dequantize_fp8, quantize_fp8
from labkit.quant.gptq import quantize_gptq
from labkit.quant.grid import PER_CHANNEL, Scheme
from labkit.quant.inputs import Inputs, linears_of, observe_inputs
from labkit.quant.quality import Estimate, measure_quality, reference_of
from labkit.quant.rtn import quantize_rtn
from labkit.texts import EVALUATION, calibration_windows, cut_windows, token_windows

MODEL = "smollm2"
WINDOWS, LENGTH = 8, 512
CALIBRATION = 16  # windows
IQR_OF_INTERVAL = 1.349 / 3.920  # of a normal distribution: its middle half beside its middle 95 %


@dataclass
class Calibration:
    """Text that is not evaluated on, and what the unquantized model's layers read of it."""

    tokens: torch.Tensor
    inputs: dict[str, Inputs]


Recipe = Callable[[nn.Module, Calibration], object]


def _rtn(scheme: Scheme) -> Recipe:
    return lambda model, calibration: quantize_rtn(model, scheme)


def _sigmas(scheme: Scheme, sigmas: float) -> Recipe:
    return lambda model, calibration: quantize_rtn(model, scheme, lambda _, w: clamp_sigmas(w, sigmas, scheme))


def _clip(scheme: Scheme, by_output: bool = True) -> Recipe:
    def run(model: nn.Module, calibration: Calibration) -> None:
        def cut(name: str, weight: torch.Tensor) -> torch.Tensor:
            return search_clip(weight, scheme, calibration.inputs[name].hessian if by_output else None)

        quantize_rtn(model, scheme, cut)

    return run


def _awq(scheme: Scheme, clip: bool = True, gptq: bool = False) -> Recipe:
    def run(model: nn.Module, calibration: Calibration) -> None:
        prepare_awq(model, calibration.inputs, scheme, clip=clip and not gptq, progress=sys.stderr.isatty())
        if gptq:
            quantize_gptq(model, calibration.tokens, scheme, clip=clip, progress=sys.stderr.isatty())
        else:
            quantize_rtn(model, scheme)

    return run


def _gptq(scheme: Scheme, **options: Any) -> Recipe:
    return lambda model, calibration: quantize_gptq(
        model, calibration.tokens, scheme, progress=sys.stderr.isatty(), **options
    )


def _stored(folder: Path) -> Recipe:
    return lambda model, calibration: dequantize_into(model, folder)


def _each(change: Callable[[torch.Tensor], torch.Tensor]) -> Recipe:
    @torch.no_grad()
    def run(model: nn.Module, calibration: Calibration) -> None:
        for linear in linears_of(model).values():
            linear.weight.copy_(change(linear.weight))

    return run


def recipes() -> dict[str, tuple[Recipe, str]]:
    """Name -> (how it quantizes a model in place, the name of the rounding to nearest that it stands beside)."""
    half = torch.float16
    rows, g64, three = Scheme(4, PER_CHANNEL, scale_dtype=half), Scheme(4, 64, scale_dtype=half), Scheme(3, 64)
    by_row, by_group, of_three = "int4 per channel, RTN", "int4 g64, RTN", "int3 g64, RTN"
    return {
        by_row: (_rtn(rows), by_row),
        by_group: (_rtn(g64), by_group),
        of_three: (_rtn(three), of_three),
        "int4 g64, AWQ scales and clip": (_awq(g64), by_group),
        "int4 g64, AWQ scales, clip and GPTQ": (_awq(g64, gptq=True), by_group),
        "int3 g64, AWQ scales, clip and GPTQ": (_awq(three, gptq=True), of_three),
        "int4 per channel, clamp at 3 sigma": (_sigmas(rows, 3), by_row),
        "int4 per channel, clip search": (_clip(rows), by_row),
        "int4 per channel, clip search by weight error": (_clip(rows, by_output=False), by_row),
        "int4 g64, clip search": (_clip(g64), by_group),
        "Q4_0 blocks of 32": (_each(lambda w: quantize_q4_0(w).dequantize()), by_group),
        "Q4_K blocks of 32, super-blocks of 192": (_each(lambda w: quantize_q4_k(w, 192).dequantize()), by_group),
        "fp8 e4m3 per channel": (_each(lambda w: dequantize_fp8(*quantize_fp8(w))), by_row),
        "fp8 e5m2 per channel": (_each(lambda w: dequantize_fp8(*quantize_fp8(w, torch.float8_e5m2))), by_row),
        "int8 per channel, RTN": (_rtn(Scheme(8)), by_row),
        "int4 g64, GPTQ": (_gptq(g64), by_group),
        "int4 g64, AWQ scales": (_awq(g64, clip=False), by_group),
        "int3 g64, AWQ scales and clip": (_awq(three), of_three),
        "int4 per channel, AWQ scales and clip": (_awq(rows), by_row),
        "int4 per channel, GPTQ": (_gptq(rows), by_row),
    }


def _row(case: str, unit: str, better: str, found: Estimate, peers: dict[str, float]) -> Row:
    interval = [round(found.low, 6), round(found.high, 6)]
    spread = (found.high - found.low) * IQR_OF_INTERVAL / found.value
    return Row(case, unit, better, round(found.value, 6), peers, round(spread, 4), interval=interval)


def run(path: Path, only: str, checkpoints: dict[str, Path], texts: dict[str, Path] | None = None) -> list[Row]:
    """Run the recipes that `path` lacks, and write it after each. Gives all rows. texts: further ones, name -> file."""
    texts = texts or {}
    chosen = {name: recipe for name, recipe in recipes().items() if only in name or name == recipe[1]}
    for name, folder in checkpoints.items():
        chosen[name] = _stored(folder), "int4 g64, RTN"
    rows = load(path).rows if path.exists() else []
    done = {row.case for row in rows}
    todo = {name: [t for t in (*EVALUATION, *texts) if f"{name}: KL, {t}" not in done] for name in chosen}
    todo = {name: lacking for name, lacking in todo.items() if lacking}
    if not todo:
        return rows
    base, tokenizer = load_model(MODEL, group_size=64)
    windows = {text: token_windows(tokenizer, text, WINDOWS, LENGTH) for text in EVALUATION}
    for text, file in texts.items():
        windows[text] = cut_windows(tokenizer, file.read_text(encoding="utf-8"), text, WINDOWS, LENGTH)
    needed = {text for lacking in todo.values() for text in lacking}
    references = {
        text: reference_of(base, cut, dtype=torch.bfloat16, batch_size=1)
        for text, cut in windows.items()
        if text in needed
    }
    plain = {text: measure_quality(base, r, dtype=torch.bfloat16, batch_size=1) for text, r in references.items()}
    tokens = calibration_windows(tokenizer, CALIBRATION, LENGTH)
    calibration = Calibration(tokens, observe_inputs(base, tokens))
    for name in todo:
        began = time.perf_counter()
        recipe, rounding = chosen[name]
        model = copy.deepcopy(base)
        recipe(model, calibration)
        for text in todo[name]:
            found = measure_quality(model, references[text], dtype=torch.bfloat16, batch_size=1)
            rounded = {row.case: row.ours for row in rows}
            kl = rounded.get(f"{rounding}: KL, {text}", round(found.kl_divergence.value, 6))
            perplexity = round(plain[text].perplexity.value, 4)
            rows += [
                _row(f"{name}: KL, {text}", "nat", "lower", found.kl_divergence, {"rtn": kl}),
                _row(f"{name}: perplexity, {text}", "1", "lower", found.perplexity, {"fp16": perplexity}),
                _row(f"{name}: top-1, {text}", "share", "higher", found.top1, {"fp16": 1.0}),
            ]
            print(f"{name}, {text}: {found}", flush=True)
        print(f"  {time.perf_counter() - began:.0f} s", flush=True)
        evidence(path, rows).write(path)
    return rows


def evidence(path: Path, rows: list[Row]) -> Evidence:
    """Evidence of a run on this machine's CPU."""
    versions = {"python": platform.python_version()}
    versions |= {name: importlib.metadata.version(name) for name in ("torch", "triton", "transformers")}
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    command = f"python -m labkit.benchmarks.quant_quality --json {path.name}"
    return Evidence("quant_quality", "cpu", "none", versions, today, command, rows)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True, help="the evidence file, begun or gone on with")
    parser.add_argument("--only", default="", help="recipes whose name holds this text, and the roundings beside them")
    parser.add_argument("--checkpoint", action="append", default=[], metavar="NAME=FOLDER", help="measure this one too")
    parser.add_argument("--text", action="append", default=[], metavar="NAME=FILE", help="measure on this one too")
    options = parser.parse_args()

    def paths(given: list[str]) -> dict[str, Path]:
        return {name: Path(path) for name, _, path in (one.partition("=") for one in given)}

    run(options.json, options.only, paths(options.checkpoint), paths(options.text))
    return 0


if __name__ == "__main__":
    sys.exit(main())
