"""How a vLLM server is to be started: a typed launch line, and the environment that goes with it."""

from __future__ import annotations

import functools
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib import metadata
from pathlib import Path

from labkit.serve.values import is_number, is_whole

DTYPES = ("auto", "float16", "bfloat16", "float32")
CUDAGRAPH_MODES = ("NONE", "PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")
OFFLINE = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
PLAIN = {"NO_COLOR": "1"}  # a notebook's kernel asks its children for colours, and their codes would stand in the log
# On a CPU the engine runs in one process with one thread: with more, threads of several processes spin for the cores.
# And nothing is compiled: the first request for log-probabilities would wait half a minute for a C++ compiler.
ON_CPU = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
# What a notebook sets for itself: a server must not interpret its kernels, and its log is to be read.
NOT_PASSED_ON = ("TRITON_INTERPRET", "VLLM_LOGGING_LEVEL", "VLLM_ENABLE_V1_MULTIPROCESSING")


@dataclass(frozen=True)
class Launch:
    """What to start. None leaves a choice to vLLM.

    model: a folder, or a name that the hub cache holds. served_name: what requests call it. max_model_len,
    max_num_batched_tokens, block_size: tokens. kv_cache_memory: bytes; gpu_memory_utilization: fraction of the
    device's memory, weights included. num_blocks: of the KV cache, whatever memory there is. eager: no graphs and no
    compilation; None means eager on a CPU. capture_sizes: batch sizes of CUDA graphs. scheduler: "module.Class".
    plugins: names of entry points that vLLM loads, all others being left out; None lets it load what is installed.
    more: further arguments, as they stand. environment: further variables.

    ValueError names the field that is wrong. What only the engine can find out is said by its log.
    """

    model: str | Path
    served_name: str = "tiny"
    dtype: str = "auto"
    max_model_len: int | None = None
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    block_size: int | None = None
    kv_cache_memory: int | None = None
    gpu_memory_utilization: float | None = None
    num_blocks: int | None = None
    kv_cache_dtype: str | None = None
    quantization: str | None = None
    prefix_caching: bool | None = None
    eager: bool | None = None
    cudagraph_mode: str | None = None
    capture_sizes: tuple[int, ...] | None = None
    attention_backend: str | None = None
    scheduler: str | None = None
    plugins: tuple[str, ...] | None = None
    seed: int = 0
    more: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.model, str | Path) or not _is_value(str(self.model)):
            raise ValueError(f"model must be a folder or a name, and is {self.model!r}")
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "block_size", "num_blocks"):
            _positive(name, getattr(self, name))
        _positive("kv_cache_memory", self.kv_cache_memory)
        if not is_whole(self.seed, 0):
            raise ValueError(f"seed must be a whole number of at least 0, and is {self.seed!r}")
        used = self.gpu_memory_utilization
        if used is not None and not (is_number(used) and 0 < used <= 1):
            raise ValueError(f"gpu_memory_utilization must be above 0 and at most 1, and is {used!r}")
        for name, known in (("dtype", DTYPES), ("cudagraph_mode", CUDAGRAPH_MODES)):
            value = getattr(self, name)
            if value not in known and not (value is None and name == "cudagraph_mode"):
                raise ValueError(f"{name} must be one of {', '.join(known)}, and is {value!r}")
        self._check_names()
        self._check_many()
        for name in ("prefix_caching", "eager"):
            if not isinstance(getattr(self, name), bool | None):
                raise ValueError(f"{name} must be True, False or None, and is {getattr(self, name)!r}")
        if self.eager and (self.cudagraph_mode not in (None, "NONE") or self.capture_sizes):
            raise ValueError("eager: an eager engine captures no graphs, so cudagraph_mode and capture_sizes must go")

    def _check_names(self) -> None:
        _name("served_name", self.served_name)
        for name in ("kv_cache_dtype", "quantization", "attention_backend"):
            if getattr(self, name) is not None:
                _name(name, getattr(self, name))
        if self.scheduler is not None:
            _name("scheduler", self.scheduler)
            if not all(part.isidentifier() for part in self.scheduler.split(".")) or "." not in self.scheduler:
                raise ValueError(f"scheduler must be 'module.Class', and is {self.scheduler!r}")

    def _check_many(self) -> None:
        for name, each in (("capture_sizes", None), ("plugins", str), ("more", str)):
            values = getattr(self, name)
            if values is None and name != "more":
                continue
            if isinstance(values, str) or not isinstance(values, Sequence):
                raise ValueError(f"{name} must be a tuple, and is {values!r}")
            for value in values:
                if each is None:
                    _positive(name, value)
                elif not _is_text(value):
                    raise ValueError(f"{name} must hold texts, and {value!r} is none")
        for argument in self.more:
            if (flag := _flag(argument)) in TAKEN:
                raise ValueError(f"more: {flag} is what `{TAKEN[flag]}` is for")
        if not isinstance(self.environment, Mapping):
            raise ValueError(f"environment must map names to texts, and is {self.environment!r}")
        for variable, value in self.environment.items():
            if not (_is_text(variable) and _is_text(value)) or not variable or "=" in variable:
                raise ValueError(f"environment must map names to texts, and has {variable!r}: {value!r}")

    def command(self, port: int) -> list[str]:
        """The command line, for a port on the loopback interface."""
        found = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port)]
        found += ["--uvicorn-log-level", "warning"]  # one line a request would bury what the log says
        for f in fields(self):
            value = getattr(self, f.name)
            if f.name in FLAGS and value is not None:
                found += [FLAGS[f.name], str(value)]
        if self.prefix_caching is not None:
            found.append("--enable-prefix-caching" if self.prefix_caching else "--no-enable-prefix-caching")
        if self.eager or (self.eager is None and on_cpu()):
            found.append("--enforce-eager")
        if self.capture_sizes:
            found += ["--cudagraph-capture-sizes", *map(str, self.capture_sizes)]
        return [*found, *_reports(), *self.more]

    def option(self, *names: str) -> str | None:
        """The value of an option among `more`, given by all of its names; None if it is not there."""
        for place, argument in enumerate(self.more):
            if _flag(argument) in names:
                _, equals, value = argument.partition("=")
                return value if equals else "".join(self.more[place + 1 : place + 2])
        return None

    def variables(self) -> dict[str, str]:
        """The whole environment of the server: ours, set offline and without usage statistics."""
        found = {name: value for name, value in os.environ.items() if name not in NOT_PASSED_ON}
        found |= {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **OFFLINE, **PLAIN}
        if on_cpu():
            found |= ON_CPU
        if self.plugins is not None:
            found["VLLM_PLUGINS"] = ",".join(self.plugins)
        return found | dict(self.environment)


FLAGS = {
    "model": "--model",
    "served_name": "--served-model-name",
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "block_size": "--block-size",
    "kv_cache_memory": "--kv-cache-memory-bytes",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "num_blocks": "--num-gpu-blocks-override",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "cudagraph_mode": "-cc.cudagraph_mode",
    "attention_backend": "--attention-backend",
    "scheduler": "--scheduler-cls",
    "seed": "--seed",
}
TAKEN = {flag: name for name, flag in FLAGS.items()} | {"--port": "port"}


def on_cpu() -> bool:
    """Whether the installed vLLM is a build for CPUs. RuntimeError if none is installed."""
    try:
        return "cpu" in metadata.version("vllm")
    except metadata.PackageNotFoundError:
        raise RuntimeError("vLLM is not installed: `make setup` installs it") from None


@functools.cache
def _reports() -> tuple[str, ...]:
    """Switches for each request's times and cached tokens, as far as the installed vLLM knows them."""
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        return ()
    entrypoints = Path(spec.submodule_search_locations[0]) / "entrypoints"
    known = "".join(path.read_text(encoding="utf-8") for path in entrypoints.rglob("cli_args.py"))
    switches = ("enable_prompt_tokens_details", "enable_per_request_metrics")
    return tuple(f"--{name.replace('_', '-')}" for name in switches if name in known)


def _flag(argument: str) -> str:
    """The option that an argument names, as vLLM's parser reads it; "" for a value."""
    return argument.partition("=")[0].replace("_", "-") if argument.startswith("-") else ""


def _positive(name: str, value: object) -> None:
    if value is not None and not is_whole(value):
        raise ValueError(f"{name} must be a whole number of at least 1, and is {value!r}")


def _is_text(value: object) -> bool:
    """Whether an argument or a variable of a process can hold it."""
    return isinstance(value, str) and "\0" not in value


def _is_value(value: object) -> bool:
    """Whether it can follow an option on a command line."""
    return isinstance(value, str) and _is_text(value) and bool(value.strip()) and not value.startswith("-")


def _name(name: str, value: object) -> None:
    if not _is_value(value):
        raise ValueError(f"{name} must be a text that is no option of the command line, and is {value!r}")
