"""One vLLM engine in a process of its own, which measures what it is told to: `EngineProcess` is the near end.

Several are started at once and asked in turn, so that what is compared runs in one run on one GPU; only one of them
computes at a time. The far end (`python -m labkit.benchmarks.vllm_engine`) reads requests and writes replies, a line of
JSON each; all that vLLM itself prints goes to a log file.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TextIO

import numpy as np

PROMPT_SEED = 0
PINNED_CORES = 4  # an engine's core, its client, and threads of theirs that wait


@dataclass(frozen=True)
class EngineSpec:
    """How an engine is started. name: in replies. model: a folder with a config.json. options: further EngineArgs.

    probe: note graphs inside the worker (`vllm_probe`). attention: for LABKIT_ATTENTION, or "".
    """

    name: str
    model: str
    options: dict[str, Any] = field(default_factory=dict)
    attention: str = ""
    probe: bool = True


@dataclass(frozen=True)
class Batch:
    """Requests that are handed in at once. prompt: random tokens of each. outputs: tokens that each generates.

    prompts: token ids of each, where random ones will not do.
    """

    prompt: int
    outputs: tuple[int, ...]
    prompts: tuple[tuple[int, ...], ...] | None = None


class EngineProcess:
    """A started engine. `wait` before the first `measure`; `stop` when done, in a finally."""

    def __init__(self, spec: EngineSpec, log: Path) -> None:
        self.spec = spec
        self.log = log
        environment = {
            **os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_USE_FLASHINFER_SAMPLER": "0",
            "VLLM_CACHE_ROOT": str(log.with_suffix(".cache")), "TMPDIR": str(log.parent),
            "LABKIT_ATTENTION": spec.attention,
        }  # fmt: skip
        with log.open("w", encoding="utf-8") as file:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "labkit.benchmarks.vllm_engine"], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                stderr=file, text=True, env=environment, start_new_session=True,
            )  # fmt: skip
        self._send(asdict(spec))

    def wait(self) -> dict[str, Any]:
        """What starting took, once the engine is ready. RuntimeError with the end of its log if it is not."""
        return self._receive()

    def pin(self) -> None:
        """Keep it on the cores that all pinned engines share: see `pin`."""
        pin(self._process.pid)

    def measure(self, batch: Batch) -> dict[str, Any]:
        """Run a batch: {"seconds", "step_ms", "tokens", "token_ids", "steps"}. RuntimeError if the engine died."""
        self._send(asdict(batch))
        return self._receive()

    def recapture(self) -> dict[str, Any]:
        """Capture all graphs anew: {"capture_seconds", "capture_bytes"}. RuntimeError if the engine died."""
        self._send({"recapture": True})
        return self._receive()

    def stop(self) -> None:
        """End the engine, its own processes included."""
        assert self._process.stdin is not None
        self._process.stdin.close()  # the far end leaves its loop and shuts vLLM down
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)  # vLLM's own processes are in its group
        self._process.wait()

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise RuntimeError(self._death()) from None

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError(self._death())
        return json.loads(line)

    def _death(self) -> str:
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return f"the engine {self.spec.name} ended: " + "\n".join(lines[-12:])


def pin(session: int, cores: int = PINNED_CORES) -> None:
    """Keep every thread of a session's processes on the last `cores` that we may use.

    Engines that are compared then share them, in turn: where the scheduler happens to put a process, and the next
    moment its peer, is no longer in the figures. Threads that end meanwhile are passed over.
    """
    chosen = sorted(os.sched_getaffinity(0))[-cores:]
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getsid(int(process.name)) == session:
                for thread in list((process / "task").iterdir()):
                    os.sched_setaffinity(int(thread.name), chosen)


def start(spec: EngineSpec) -> Any:
    """A vLLM engine, tokens in and tokens out, its plugins and the probe put in place before it forks."""
    from labkit.benchmarks import vllm_probe
    from labkit.serve import plugins

    plugins.register()
    if spec.probe:
        vllm_probe.install()
    from vllm import EngineArgs
    from vllm.v1.engine.llm_engine import LLMEngine

    return LLMEngine.from_engine_args(
        EngineArgs(
            model=spec.model, skip_tokenizer_init=True, disable_log_stats=True,
            **{"enable_prefix_caching": False, **spec.options},
        )
    )  # fmt: skip


def run_batch(engine: Any, batch: Batch) -> dict[str, Any]:
    """Hand all requests in and step until they are done.

    seconds: of all steps. step_ms: mean time between the first step in which every request decodes and the last.
    ttft_ms: mean time to a request's first token. tokens: generated. token_ids: of each request.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    random = np.random.default_rng(PROMPT_SEED)
    vocab = engine.model_config.get_vocab_size()
    for n, length in enumerate(batch.outputs):
        prompt = list(batch.prompts[n]) if batch.prompts else random.integers(10, vocab - 10, batch.prompt).tolist()
        sampling = SamplingParams(
            temperature=0, max_tokens=length, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        engine.add_request(str(n), {"prompt_token_ids": prompt}, sampling)
    token_ids: list[list[int]] = [[] for _ in batch.outputs]
    together: list[float] = []
    first: dict[str, float] = {}
    begin = time.perf_counter()
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter()
        for output in outputs:
            first.setdefault(output.request_id, now)
            token_ids[int(output.request_id)] += output.outputs[0].token_ids
        if len(outputs) == len(batch.outputs) and all(len(ids) > 1 for ids in token_ids):
            together.append(now)
    return {
        "seconds": time.perf_counter() - begin,
        "step_ms": 1e3 * (together[-1] - together[0]) / (len(together) - 1) if len(together) > 1 else None,
        "ttft_ms": 1e3 * (sum(first.values()) / len(first) - begin),
        "tokens": sum(batch.outputs),
        "token_ids": token_ids,
    }


def _probed(engine: Any, spec: EngineSpec) -> dict[str, Any]:
    from labkit.benchmarks import vllm_probe

    return engine.collective_rpc(vllm_probe.METHOD)[0] if spec.probe else {}


def main(requests: TextIO, replies: TextIO) -> None:
    """The far end: the first line is an EngineSpec, every further one a Batch or {"recapture": true}."""
    from labkit.benchmarks import vllm_probe

    spec = EngineSpec(**json.loads(requests.readline()))
    begin = time.perf_counter()
    engine = start(spec)
    ready = {"start_seconds": time.perf_counter() - begin, **_probed(engine, spec)}
    print(json.dumps(ready), file=replies, flush=True)
    for line in requests:
        message = json.loads(line)
        if "recapture" in message:
            ready = engine.collective_rpc(vllm_probe.RECAPTURE)[0]
            print(
                json.dumps({key: ready[key] for key in ("capture_seconds", "capture_bytes")}), file=replies, flush=True
            )
            continue
        batch = Batch(message["prompt"], message["outputs"], message["prompts"])
        result = run_batch(engine, batch) | {"steps": _probed(engine, spec).get("steps", [])}
        print(json.dumps(result), file=replies, flush=True)
    engine.engine_core.shutdown()


def divergence(ours: Sequence[Sequence[int]], theirs: Sequence[Sequence[int]]) -> float:
    """Share of tokens up to which two runs agree: 1.0 when all tokens are equal."""
    agreed = 0
    for a, b in zip(ours, theirs, strict=True):
        agreed += next((n for n, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), len(a))
    return agreed / max(1, sum(len(a) for a in ours))


if __name__ == "__main__":
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # vLLM and its processes print on stdout
    main(sys.stdin, replies)
