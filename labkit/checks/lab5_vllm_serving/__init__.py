"""Public checks of lab 5, serving with vLLM."""

from labkit.checks.lab5_vllm_serving import (
    attention,
    capacity,
    graphs,
    latency,
    logs,
    measured,
    policy,
    prefix,
    pressure,
    tuning,
)

QUESTIONS = [
    *logs.QUESTIONS,
    *latency.QUESTIONS,
    *capacity.QUESTIONS,
    *pressure.QUESTIONS,
    *prefix.QUESTIONS,
    *tuning.QUESTIONS,
    *graphs.QUESTIONS,
    *policy.QUESTIONS,
    *attention.QUESTIONS,
    *measured.QUESTIONS,
]
