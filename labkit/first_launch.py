"""Where the time of a kernel's first launch goes: measured in a process of its own, in which nothing is warm.

The kernel is compiled for an sm_90 GPU that need not be here, as its first launch would, and not run; times are this
machine's.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass

TIMEOUT = 120.0  # seconds; about six are usual
STAGES = {
    "ttir": "Python to Triton's IR, tidied",
    "ttgir": "to GPU IR: layouts, pipelining",
    "llir": "to LLVM's IR",
    "ptx": "LLVM, to PTX",
    "cubin": "ptxas, to machine code",
}


@dataclass(frozen=True)
class FirstLaunch:
    """Seconds. first, second: of two launches, one after the other. parts: what the first is made of, in order, and
    before it the imports, which `first` does not contain.
    """

    parts: dict[str, float]
    first: float
    second: float


def measure() -> FirstLaunch:
    """Have a fresh process compile the kernel that writes K and V. RuntimeError, with its last words, if it fails."""
    with tempfile.TemporaryDirectory() as cache:
        changed = {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TRITON_CACHE_DIR": cache}
        done = subprocess.run(
            [sys.executable, "-m", "labkit.first_launch"],
            env=os.environ | changed, capture_output=True, text=True, timeout=TIMEOUT,
        )  # fmt: skip
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
        raise RuntimeError(f"compiling in a fresh process failed: {last}")
    return FirstLaunch(**json.loads(done.stdout.splitlines()[-1]))


def main() -> None:
    """In the process: import, launch twice, and print the times as JSON."""
    start = time.perf_counter()
    from triton import knobs

    from labkit.compiled.examples import EXAMPLES
    from labkit.triton_internals import compiling

    [call] = [example.call() for example in EXAMPLES if example.name == "kv_cache.write_kv"]
    imported = time.perf_counter()
    times = []
    knobs.compilation.listener = lambda **heard: times.append(heard["times"])
    with compiling.recorded_launches(90, num_sms=132):
        call.function(*call.args, **call.kwargs)
        launched = time.perf_counter()
        call.function(*call.args, **call.kwargs)
        again = time.perf_counter()
    lowering: dict[str, float] = {}
    for found in times:
        lowering["ttir"] = lowering.get("ttir", 0.0) + found.ir_initialization * 1e-6
        for stage, microseconds in found.lowering_stages:
            lowering[stage] = lowering.get(stage, 0.0) + microseconds * 1e-6
    stored = sum(found.store_results for found in times) * 1e-6
    first = launched - imported
    parts = {"imports (torch, triton)": imported - start}
    parts |= {STAGES.get(stage, stage): seconds for stage, seconds in lowering.items()}
    parts |= {"to the cache on disk": stored, "the rest: wrapper, arguments": first - sum(lowering.values()) - stored}
    print(json.dumps({"parts": parts, "first": first, "second": again - launched}))


if __name__ == "__main__":
    main()
