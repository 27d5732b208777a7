"""Engines of the installed vLLM, one after another in one process, with the plugins in them. A test runs it.

Argument: a folder for records. Prints what it found as JSON.
"""

from __future__ import annotations

import gc
import json
import os
import sys

os.environ.update(
    VLLM_ENABLE_V1_MULTIPROCESSING="0", OMP_NUM_THREADS="1", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    VLLM_LOGGING_LEVEL="WARNING", LABKIT_RECORDS=sys.argv[1], VLLM_PLUGINS="labkit,labkit_records,labkit_limits",
)  # fmt: skip

import torch
from vllm import EngineArgs, SamplingParams
from vllm.distributed import destroy_distributed_environment, destroy_model_parallel
from vllm.v1.engine.llm_engine import LLMEngine

from labkit import models
from labkit.serve.plugins import attention, policies, records, scheduler

PROMPTS = {n: [5 + (i * 7 + j * 13) % 2000 for j in range(n)] for i, n in enumerate((48, 33, 20, 9, 5))}


def run(outputs: int = 3, **options) -> dict:
    """Answer PROMPTS, and say what stands inside the engine that did."""
    loggers = {"stat_loggers": [records.RecordLogger]} if "scheduler_cls" in options else {}
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=str(models.tiny_path()), dtype="float32", enforce_eager=True, kv_cache_memory_bytes=2**23,
            block_size=32, max_model_len=128, max_num_seqs=2, disable_log_stats=not loggers, **options,
        ),
        **loggers,
    )  # fmt: skip
    core = engine.engine_core.engine_core
    for n, prompt in PROMPTS.items():
        sampling = SamplingParams(temperature=0, max_tokens=outputs, ignore_eos=True)
        engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling)
    done, most_running = {}, []
    if loggers:
        core.labkit_limits({"max_num_active_reqs": 1})
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                done[output.request_id] = list(output.outputs[0].token_ids)
        most_running.append(len(core.scheduler.running))
    layer = core.model_executor.driver_worker.worker.model_runner.model.model.layers[0].self_attn.attn
    used = getattr(layer.impl, "attention", None)
    found = {
        "tokens": done,
        "impl": type(layer.impl).__name__,
        "attention": getattr(used, "__name__", None),
        "admitted": [name.split("-")[0] for name in getattr(core.scheduler, "admitted", ())],
        "most_running": max(most_running),
        "refused": core.labkit_limits({"max_num_seqs": 1}) if loggers else None,
    }
    engine.engine_core.shutdown()
    del engine, core, layer
    gc.collect()
    destroy_model_parallel()
    destroy_distributed_environment()
    return found


def forgets_the_scale(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale) -> torch.Tensor:
    """Attention with a bug that gives plausible numbers."""
    return attention.kernels_attention(q, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, 1.0)


found = {"stock": run(scheduler_cls=scheduler.with_policy(policies.POLICIES["shortest_prompt"]))}
attention.inject(attention.kernels_attention)
found["kernels"] = run()
attention.inject(forgets_the_scale)
found["wrong"] = run()
attention.inject(None)
found["again"] = run()
print("FOUND " + json.dumps(found))
