"""vLLM engines in this very process, for a notebook: one at a time, a few prompts each, and what stood inside them.

A class or a function of a notebook can be put into an engine only where the engine runs in the notebook's process.
Import this module before vLLM is imported: what decides that is read from the environment then.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from labkit import models
from labkit.checks import capture
from labkit.models.files import cache_folder
from labkit.serve.plugins.policies import Policy
from labkit.serve.recording import why_not_live

ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CPU_INT4_W4A8": "0",  # else a CPU with AMX rounds activations as well
}  # fmt: skip
for _name, _value in ENVIRONMENT.items():
    os.environ.setdefault(_name, _value)

EVIDENCE = Path(__file__).resolve().parents[1] / "evidence"
INT4_GROUP = 64


@dataclass(frozen=True)
class Answers:
    """What an engine gave. tokens: prompt -> token ids.

    logprobs: prompt -> token -> log-probability, of the first token that is generated. admitted: prompts in the order
    in which they were first scheduled. attention: which function the layers ran, or why not the one asked for.
    """

    tokens: dict[str, list[int]]
    logprobs: dict[str, dict[int, float]] = field(default_factory=dict)
    admitted: tuple[str, ...] = ()
    attention: str = "vLLM's own"


def answer(
    prompts: Mapping[str, list[int]], *, model: Path | str | None = None, outputs: int = 6, logprobs: int | None = None,
    policy: Policy | None = None, attention: Callable[..., torch.Tensor] | None = None, **options: Any,
) -> Answers:  # fmt: skip
    """Start an engine, answer the prompts greedily, and stop it.

    prompts: name -> token ids, handed in in this order. model: a folder; the tiny Qwen3 if None. outputs: tokens of
    each. logprobs: how many to give. policy: of admission. attention: a function as in `plugins.attention`. options: of
    vLLM's EngineArgs. RuntimeError where none may start, and with the end of what vLLM said if it fails.
    """
    if reason := why_not_live():
        raise RuntimeError(f"no engine is started here, since {reason}")
    hook = sys.excepthook  # vLLM puts one of its own around it, once more with each engine
    # In a folder of its own, since a failed start leaves its rendezvous file behind.
    with (
        capture.stderr() as said,
        tempfile.TemporaryDirectory() as scratch,
        mock.patch.object(tempfile, "tempdir", scratch),
    ):
        try:
            return _answer(prompts, str(model or models.tiny_path()), outputs, logprobs, policy, attention, options)
        except Exception as error:
            failure = error
        finally:
            sys.excepthook = hook
    raise RuntimeError(f"vLLM failed: {type(failure).__name__}: {failure}\n{said()[-1500:]}") from failure


def _answer(
    prompts: Mapping[str, list[int]], model: str, outputs: int, logprobs: int | None, policy: Policy | None,
    function: Callable[..., torch.Tensor] | None, options: dict[str, Any],
) -> Answers:  # fmt: skip
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    from labkit.serve.plugins import attention
    from labkit.serve.plugins.policies import POLICIES
    from labkit.serve.plugins.scheduler import with_policy

    attention.inject(function)
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model, max_model_len=256, max_logprobs=logprobs or 20, disable_log_stats=True, use_tqdm_on_load=False,
            scheduler_cls=with_policy(policy or POLICIES["fcfs"]), **{**_sizes(), **options},
        )
    )  # fmt: skip
    try:
        core: Any = engine.engine_core.engine_core  # type: ignore[attr-defined]
        for name, prompt in prompts.items():
            sampling = SamplingParams(
                temperature=0, max_tokens=outputs, ignore_eos=True, logprobs=logprobs, detokenize=False
            )
            engine.add_request(name, {"prompt_token_ids": prompt}, sampling)
        done: dict[str, Any] = {}
        while engine.has_unfinished_requests():
            finished: list[Any] = [output for output in engine.step() if output.finished]
            done |= {output.request_id: output.outputs[0] for output in finished}
        return Answers(
            tokens={name: list(done[name].token_ids) for name in prompts},
            logprobs={n: {t: p.logprob for t, p in done[n].logprobs[0].items()} for n in prompts if logprobs},
            admitted=tuple(name.rsplit("-", 1)[0] for name in core.scheduler.admitted),
            attention=_attention_in(core),
        )
    finally:
        attention.inject(None)
        _stop(engine)


def refusal(attention: Callable[..., torch.Tensor]) -> str:
    """What the plugin's gate says to an attention function for the tiny Qwen3's layers, or "" if it is right."""
    from labkit.serve.plugins import gate

    sizes = models.tiny.SIZES
    shape = gate.Shape(sizes["num_attention_heads"], sizes["num_key_value_heads"], sizes["head_dim"], 32, torch.float32)
    return gate.fault_of(attention, shape, torch.device("cuda" if torch.cuda.is_available() else "cpu"))


@torch.no_grad()
def plain_logprobs(folder: Path | str, prompts: Mapping[str, list[int]]) -> dict[str, dict[int, float]]:
    """prompt -> token -> log-probability of the next token, of all tokens, by transformers in fp32: no engine."""
    model, _ = models.load_model(str(folder))
    found = {}
    for name, prompt in prompts.items():
        last = model(torch.tensor([prompt])).logits[0, -1].float().log_softmax(-1)
        found[name] = dict(enumerate(last.tolist()))
    return found


def _sizes() -> dict[str, Any]:
    """What makes an engine small: on a CPU as in labkit.serve.Launch, on a GPU with graphs left out as well."""
    common = {"enforce_eager": True, "kv_cache_memory_bytes": 2**25, "block_size": 32, "max_num_seqs": 8}
    return common if not torch.cuda.is_available() else common | {"gpu_memory_utilization": 0.1}


def _attention_in(core: Any) -> str:
    model = core.model_executor.driver_worker.worker.model_runner.model
    impl = model.model.layers[0].self_attn.attn.impl
    used, fault = getattr(impl, "attention", None), getattr(impl, "fault", "")
    if used is not None:
        return getattr(used, "__name__", "a function")
    return f"vLLM's own, since the one asked for is wrong: {fault}" if fault else "vLLM's own"


def _stop(engine: Any) -> None:
    """Leave nothing of an engine, so that the next can start in this process."""
    from vllm.distributed import destroy_distributed_environment, destroy_model_parallel

    engine.engine_core.shutdown()
    del engine
    gc.collect()
    destroy_model_parallel()
    destroy_distributed_environment()


def graph_mode(**options: Any) -> str:
    """The cudagraph_mode that vLLM settles on for the tiny model with these EngineArgs, on a device that has graphs.

    No engine is started. Its rules are Python and need no such device: on a CPU they are asked as if there were one.
    """
    from vllm import EngineArgs
    from vllm.platforms import current_platform

    platform = type(current_platform)
    with capture.stderr(), contextlib.ExitStack() as patches:
        if not current_platform.support_static_graph_mode():
            for name, answer in (("support_static_graph_mode", True), ("check_and_update_config", None)):
                patched = mock.patch.object(platform, name, staticmethod(lambda *_, answer=answer: answer))
                patches.enter_context(patched)
        config = EngineArgs(model=str(models.tiny_path()), max_model_len=256, **options).create_engine_config()
    return config.compilation_config.cudagraph_mode.name


@dataclass(frozen=True)
class Int4Checkpoint:
    """Two folders. served: int4 in AutoAWQ's format. dequantized: the same rounded weights, as plain fp16."""

    served: Path
    dequantized: Path


def int4_checkpoint() -> Int4Checkpoint:
    """The tiny Qwen3 rounded to int4 in groups of 64, written to the cache once."""
    from labkit.models import files
    from labkit.quant import Scheme, dequantize_into, quantize_rtn, write_awq

    folder = cache_folder()
    found = Int4Checkpoint(folder / "tiny-qwen3-int4", folder / "tiny-qwen3-int4-dequantized")
    if not (found.dequantized / "config.json").exists():
        model, tokenizer = models.load_model("tiny-qwen3")
        rounded = copy.deepcopy(model)
        scheme = Scheme(4, INT4_GROUP, scale_dtype=torch.float16)
        with files.written_whole(found.served) as new:
            write_awq(rounded, quantize_rtn(rounded, scheme), new / "checkpoint", tokenizer)
            for path in (new / "checkpoint").iterdir():
                path.rename(new / path.name)
            (new / "checkpoint").rmdir()
        models.save_model(dequantize_into(model, found.served), tokenizer, found.dequantized)
    return found


def recorded_factorial() -> dict[str, dict[tuple[bool, bool], list[float]]]:
    """Recorded runs of prefix caching x graphs: unit -> (caching on, graphs on) -> times; {} if none is recorded."""
    found: dict[str, dict[tuple[bool, bool], list[float]]] = {}
    for path in sorted(EVIDENCE.glob("vllm.*.json")):
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            if row.get("variant") == "factorial":
                cell = ("caching on" in row["case"], "graphs on" in row["case"])
                found.setdefault(row["unit"], {}).setdefault(cell, []).append(row["ours"])
    return {unit: cells for unit, cells in found.items() if len(cells) == 4}
