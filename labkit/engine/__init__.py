"""A small continuous-batching engine: paged KV cache, prefix caching, chunked prefill, preemption, CUDA graphs.

>>> engine = Engine.load(folder)                                        # doctest: +SKIP
>>> engine.generate([[1, 2, 3]], SamplingParams(max_tokens=8))          # doctest: +SKIP

Read llm_engine.py (a step), scheduler.py (what is in it), runner.py (how it is computed), ops.py and triton_ops.py
(what it is made of), graphs.py. The names below are the public ones; labs also use what graphs.py names, and policy.py.
"""

from labkit.engine.config import EngineConfig, ModelConfig
from labkit.engine.counters import Counters
from labkit.engine.graphs import CaptureError, default_sizes
from labkit.engine.llm_engine import Engine
from labkit.engine.policy import FCFS, Policy, Priority
from labkit.engine.requests import Emitted, EngineError, Request, SamplingParams, Status
from labkit.engine.weights import Weights, load_weights, random_weights

__all__ = [
    "FCFS",
    "CaptureError",
    "Counters",
    "Emitted",
    "Engine",
    "EngineConfig",
    "EngineError",
    "ModelConfig",
    "Policy",
    "Priority",
    "Request",
    "SamplingParams",
    "Status",
    "Weights",
    "default_sizes",
    "load_weights",
    "random_weights",
]
