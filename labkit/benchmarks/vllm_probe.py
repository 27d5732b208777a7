"""What vLLM does not report about its graphs, noted inside its worker: how long capturing took, and which graph ran.

Installed before the engine's process is forked, so that it holds there too. It watches and changes nothing, unless it
is asked to capture all graphs once more.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

METHOD, RECAPTURE = "labkit_probe", "labkit_recapture"
_seen: dict[str, Any] = {"capture_seconds": 0.0, "capture_bytes": 0, "shapes": 0, "steps": Counter()}


def install() -> None:
    """Watch the model runner of GPUs; `engine.collective_rpc(METHOD)` gives what was seen since it was last asked."""
    from vllm.v1.worker.gpu.cudagraph_utils import CudaGraphManager
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner
    from vllm.v1.worker.gpu_worker import Worker

    capture, dispatch = GPUModelRunner.capture_model, CudaGraphManager.dispatch

    def timed_capture(runner: Any) -> int:
        begin = time.perf_counter()
        taken = capture(runner)
        _seen.update(capture_seconds=time.perf_counter() - begin, capture_bytes=taken)
        manager = runner.cudagraph_manager
        _seen["shapes"] = sum(len(shapes) for shapes in manager._capture_descs.values()) if manager else 0
        return taken

    def noted_dispatch(manager: Any, num_reqs: int, num_tokens: int, *args: Any, **kwargs: Any) -> Any:
        shape = dispatch(manager, num_reqs, num_tokens, *args, **kwargs)
        _seen["steps"][shape.cg_mode.name, num_tokens, shape.num_tokens] += 1
        return shape

    setattr(GPUModelRunner, "capture_model", timed_capture)  # noqa: B010  (an assignment would be a type error)
    setattr(CudaGraphManager, "dispatch", noted_dispatch)  # noqa: B010
    setattr(Worker, METHOD, _report)
    setattr(Worker, RECAPTURE, _recapture)


def _report(worker: Any) -> dict[str, Any]:
    from vllm.compilation.counter import compilation_counter

    steps = [[*key, count] for key, count in _seen["steps"].items()]
    _seen["steps"].clear()
    return {**_seen, "steps": steps, "graphs": compilation_counter.num_cudagraph_captured}


def _recapture(worker: Any) -> dict[str, Any]:
    """Let go of all graphs and capture them anew, in a pool of their own."""
    import torch
    from vllm.compilation.cuda_graph import CUDAGraphWrapper

    manager, pool = worker.model_runner.cudagraph_manager, torch.cuda.graph_pool_handle()
    CUDAGraphWrapper.clear_all_graphs()
    for wrapper in CUDAGraphWrapper._all_instances:
        wrapper.graph_pool = pool
    manager.graphs.clear()
    manager.pool = pool
    worker.model_runner.capture_model()
    return _report(worker)
