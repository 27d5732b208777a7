"""What the plugins use of vLLM's inside, in one place, and whether an installed or unpacked vLLM still has it.

vLLM keeps its command line stable, not its classes. Each name here is one that a plugin would fail on, late and far
away, if it moved; `broken` says it by name. Sources are read, not imported, so that a vLLM for another machine, or one
that is only unpacked, can be asked too.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

V1 = "vllm.v1"


@dataclass(frozen=True)
class Need:
    """One name. parameters: that a function takes, in this order from the first; further ones may follow.

    attributes: that objects of a class have, set on self in one of its methods or declared in its body.
    """

    name: str
    used_by: str
    parameters: tuple[str, ...] = ()
    attributes: tuple[str, ...] = ()


BUILDER = ("self", "kv_cache_spec", "layer_names", "vllm_config", "device")
FORWARD = ("self", "layer", "query", "key", "value", "kv_cache", "attn_metadata", "output")
UPDATE = ("self", "layer", "key", "value", "kv_cache", "slot_mapping")
WRITE = ("key", "value", "key_cache", "value_cache", "slot_mapping", "kv_cache_dtype", "k_scale", "v_scale")
METADATA = (
    "num_actual_tokens",
    "max_query_len",
    "max_seq_len",
    "query_start_loc",
    "seq_lens",
    "block_table",
    "slot_mapping",
)
IMPL = (
    "scale",
    "num_heads",
    "attn_type",
    "alibi_slopes",
    "sliding_window",
    "logits_soft_cap",
    "kv_cache_dtype",
    "sinks",
)
RUNNER = f"{V1}.worker.gpu"

NEEDS = (
    Need(f"{V1}.core.sched.async_scheduler.AsyncScheduler", "scheduler"),
    Need(f"{V1}.core.sched.scheduler.Scheduler.schedule", "scheduler", ("self",)),
    Need(f"{V1}.core.sched.request_queue.FCFSRequestQueue", "scheduler"),
    Need(
        f"{V1}.core.sched.scheduler.Scheduler", "scheduler, limits",
        attributes=("waiting", "running", "max_num_running_reqs", "max_num_scheduled_tokens", "kv_cache_manager"),
    ),
    Need(
        f"{V1}.request.Request", "scheduler",
        attributes=("request_id", "num_prompt_tokens", "max_tokens", "arrival_time", "num_preemptions"),
    ),
    Need(f"{V1}.core.sched.output.SchedulerOutput", "scheduler", attributes=("scheduled_new_reqs",)),
    Need(f"{V1}.attention.backends.registry.register_backend", "attention", ("backend", "class_path")),
    Need(
        f"{V1}.attention.backends.registry.AttentionBackendEnum", "attention", attributes=("CUSTOM", "CPU_ATTN"),
    ),
    Need(f"{V1}.attention.backends.registry.AttentionBackendEnum.clear_override", "attention", ("self",)),
    Need(f"{V1}.attention.selector._cached_get_attn_backend", "attention"),
    Need(
        f"{V1}.attention.backend.AttentionCGSupport", "attention_cuda", attributes=("UNIFORM_SINGLE_TOKEN_DECODE",)
    ),
    Need(f"{V1}.attention.backends.triton_attn.TritonAttentionMetadataBuilder.__init__", "attention_cuda", BUILDER),
    Need(f"{V1}.attention.backends.triton_attn.TritonAttentionImpl.forward", "attention_cuda", FORWARD),
    Need(f"{V1}.attention.backends.triton_attn.TritonAttentionImpl.do_kv_cache_update", "attention_cuda", UPDATE),
    Need("vllm._custom_ops.reshape_and_cache_flash", "attention_cuda", WRITE),
    Need(f"{V1}.attention.backends.triton_attn.TritonAttentionImpl", "attention_cuda", attributes=IMPL),
    Need(f"{V1}.attention.backends.triton_attn.TritonAttentionMetadata", "attention_cuda", attributes=METADATA),
    Need(f"{V1}.attention.backends.cpu_attn.CPUAttentionMetadataBuilder.__init__", "attention_cpu", BUILDER),
    Need(f"{V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.forward", "attention_cpu", FORWARD),
    Need(f"{V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl.do_kv_cache_update", "attention_cpu", UPDATE),
    Need(f"{V1}.attention.backends.cpu_attn.CPUAttentionBackendImpl", "attention_cpu", attributes=IMPL),
    Need(f"{V1}.attention.backends.cpu_attn.CPUAttentionMetadata", "attention_cpu", attributes=METADATA),
    Need(
        f"{V1}.metrics.loggers.StatLoggerBase.record", "records",
        ("self", "scheduler_stats", "iteration_stats", "mm_cache_stats", "engine_idx"),
    ),
    Need(
        f"{V1}.metrics.stats.FinishedRequestStats", "records",
        attributes=(
            "request_id", "e2e_latency", "num_prompt_tokens", "num_generation_tokens", "queued_time", "prefill_time",
            "decode_time", "num_cached_tokens", "finish_reason",
        ),
    ),
    Need(
        f"{V1}.metrics.stats.IterationStats", "records",
        attributes=("iteration_timestamp", "finished_requests", "num_generation_tokens", "num_preempted_reqs"),
    ),
    Need(
        f"{V1}.metrics.stats.SchedulerStats", "records",
        attributes=("num_running_reqs", "num_waiting_reqs", "kv_cache_usage"),
    ),
    Need(f"{V1}.engine.core.EngineCore", "limits", attributes=("scheduler",)),
    Need(f"{V1}.engine.core_client.AsyncMPClient.call_utility_async", "limits", ("self", "method")),
    Need("vllm.plugins.endpoint_plugins.interface.EndpointPlugin.attach_router", "limits", ("self", "app")),
    Need(
        "vllm.plugins.endpoint_plugins.interface.EndpointPlugin.init_state", "limits",
        ("self", "engine_client", "state", "args"),
    ),
    Need(
        f"{V1}.cudagraph_dispatcher.CudagraphDispatcher.dispatch", "graphs", ("self", "num_tokens", "uniform_decode"),
    ),
    Need(f"{V1}.cudagraph_dispatcher.CudagraphDispatcher.get_capture_descs", "graphs", ("self",)),
    Need("vllm.config.vllm.VllmConfig._set_cudagraph_sizes", "graphs", ("self",)),
    Need(f"{RUNNER}.model_runner.GPUModelRunner.capture_model", "benchmarks.vllm_probe", ("self",)),
    Need(
        f"{RUNNER}.cudagraph_utils.CudaGraphManager.dispatch", "benchmarks.vllm_probe",
        ("self", "num_reqs", "num_tokens"),
    ),
    Need(
        f"{RUNNER}.cudagraph_utils.CudaGraphManager", "benchmarks.vllm_probe", attributes=("graphs", "pool", "capture"),
    ),
    Need(
        "vllm.compilation.cuda_graph.CUDAGraphWrapper", "benchmarks.vllm_probe",
        attributes=("clear_all_graphs", "_all_instances", "graph_pool"),
    ),
)  # fmt: skip


def broken(root: Path | None = None) -> list[str]:
    """What no longer holds, one sentence each; none if all does.

    root: the folder that holds the package `vllm`; that of the installed one if None, which is not imported.
    Raises ModuleNotFoundError where no vLLM is installed.
    """
    if root is None:
        found = importlib.util.find_spec("vllm")
        if found is None or found.origin is None:
            raise ModuleNotFoundError("vLLM is not installed: there is nothing to hold the contract against")
        root = Path(found.origin).parents[1]
    surface = read_surface(root)
    return [sentence for need in NEEDS for sentence in faults(need, surface)]


def faults(need: Need, surface: dict[str, list[str] | None]) -> Iterator[str]:
    """What a surface (see `read_surface`) lacks of one name."""
    has = surface.get(need.name)
    if has is None:
        yield f"{need.name} is gone; {need.used_by} uses it"
        return
    if need.parameters and tuple(has[: len(need.parameters)]) != need.parameters:
        yield f"{need.name} takes ({', '.join(has)}), {need.used_by} expects ({', '.join(need.parameters)}, ...)"
    for attribute in need.attributes:
        if attribute not in has:
            yield f"{need.name} has no {attribute}; {need.used_by} uses it"


def read_surface(root: Path) -> dict[str, list[str] | None]:
    """Name -> the parameters of a function, or the attributes of a class; None for what is not there. Of all NEEDS."""
    return {need.name: _describe(root, need.name.split(".")) for need in NEEDS}


def _describe(root: Path, parts: list[str]) -> list[str] | None:
    for length in range(len(parts) - 1, 0, -1):
        path = root.joinpath(*parts[:length]).with_suffix(".py")
        if path.exists():
            node: ast.AST | None = ast.parse(path.read_text(encoding="utf-8"))
            for name in parts[length:]:
                body = getattr(node, "body", [])
                node = next((n for n in body if getattr(n, "name", None) == name), None)
            return None if node is None else _members(node)
    return None


def _members(node: ast.AST) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        return [argument.arg for argument in (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)]
    targets: list[ast.expr] = []
    for inner in ast.walk(node):
        if isinstance(inner, ast.Assign):
            targets += inner.targets
        elif isinstance(inner, ast.AnnAssign):
            targets.append(inner.target)
    on_self = {t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", "") == "self"}
    declared = {t.id for t in targets if isinstance(t, ast.Name)}
    methods = {n.name for n in getattr(node, "body", []) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)}
    return sorted(on_self | declared | methods)
