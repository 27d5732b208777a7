"""Hidden checks of lab 5: logs and counters.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require
from labkit.checks.lab5_vllm_serving.cases import cpu_log, gpu_log, scrape

LAB = "lab5_vllm_serving"


@hidden_check(LAB, "server_facts")
def unseen_logs(remote: Remote) -> None:
    rng = random.Random(31)
    for _ in range(4):
        tokens, length, size = rng.randint(1, 10**7), rng.randint(100, 300_000), rng.choice([32, 64, 128])
        concurrency = round(tokens / length, 2)
        got = remote.call("server_facts", cpu_log(tokens, concurrency, length, size))
        want = {
            "kv_tokens": tokens, "max_concurrency": concurrency, "max_model_len": length, "block_size": size,
            "attention_backend": None, "cudagraph_mode": "NONE",
        }  # fmt: skip
        require(got == want, f"a log of unseen numbers gives {got!r}, {want!r} expected")
    got = remote.call("server_facts", gpu_log(999, 0.98, 1024, "FLASHINFER"))
    require(got["attention_backend"] == "FLASHINFER" and got["max_concurrency"] == 0.98, f"a GPU's log gives {got!r}")


@hidden_check(LAB, "counter_increase")
def unseen_scrapes(remote: Remote) -> None:
    rng = random.Random(32)
    for name in ("vllm:prefix_cache_hits_total", "vllm:num_preemptions_total"):
        first = [float(rng.randint(0, 9999)) for _ in range(4)]
        grown = [value + rng.randint(0, 10**7) for value in first]
        others = {"vllm:external_prefix_cache_hits_total": [5.0], "vllm:request_num_preemptions_total": [7.0]}
        got = remote.call("counter_increase", scrape({name: first}), scrape({name: grown, **others}), name)
        want = sum(grown) - sum(first)
        require(abs(got - want) < 1e-6, f"{name} over four engines grew by {got!r}, {want} expected")
