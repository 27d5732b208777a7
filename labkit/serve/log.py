"""What a vLLM log says: how the engine was set up, how far it has come, and why it did not start.

Formats are those of vLLM 0.26 to 0.32. A fact that the log does not state is None: a CPU engine names no attention
backend, since it has one only, and no log of a dense model names a block size that was not asked for.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LogFacts:
    """kv_tokens: tokens that the KV cache holds. max_concurrency: requests of max_model_len tokens that fit at once.

    kv_memory_gib, weights_gib, graphs_gib: GiB, as rounded in the log. device: "CPU" or "GPU".
    """

    version: str | None = None
    model: str | None = None
    dtype: str | None = None
    device: str | None = None
    max_model_len: int | None = None
    block_size: int | None = None
    kv_tokens: int | None = None
    max_concurrency: float | None = None
    kv_memory_gib: float | None = None
    weights_gib: float | None = None
    graphs_gib: float | None = None
    attention_backend: str | None = None
    cudagraph_mode: str | None = None
    prefix_caching: bool | None = None


def _whole(text: str) -> int:
    return int(text.replace(",", ""))


NUMBER = r"([\d.]+)"
FACTS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "version": (r"LLM engine \(v([^)\s]+)\) with config", str),
    "model": (r"with config: model='([^']+)'", str),
    "dtype": (r"\bdtype=torch\.(\w+)", str),
    "device": (r"\b(\w+) KV cache size: [\d,]+ tokens", str),
    "max_model_len": (r"\bmax_seq_len=(\d+)", _whole),
    "block_size": (r"(?:Setting attention block size to |'block_size': )(\d+)", _whole),
    "kv_tokens": (r"KV cache size: ([\d,]+) tokens", _whole),
    "max_concurrency": (rf"Maximum concurrency for [\d,]+ tokens per request: {NUMBER}x", float),
    "kv_memory_gib": (rf"(?:Available KV cache memory: |(?:Explicitly|Auto) set \(){NUMBER}", float),
    "weights_gib": (rf"Model loading took {NUMBER} GiB", float),
    "graphs_gib": (rf"Graph capturing finished in [\d.]+ secs, took {NUMBER} GiB", float),
    "attention_backend": (r"Using (?:AttentionBackendEnum\.)?(\w+) (?:attention )?backend", str),
    "cudagraph_mode": (r"'cudagraph_mode': <CUDAGraphMode\.(\w+)", str),
    "prefix_caching": (r"\benable_prefix_caching=(True|False)", "True".__eq__),
}


def read_log(text: str) -> LogFacts:
    """The facts that a log states; of what is said several times, the last."""
    found = {}
    for name, (pattern, convert) in FACTS.items():
        said = re.findall(pattern, text)
        if said:
            found[name] = convert(said[-1])
    return LogFacts(**found)


STAGES = (
    ("Available routes", "opening the port"),
    ("Capturing CUDA graphs", "graphs"),
    ("KV cache size", "KV cache"),
    ("Starting to load model", "weights"),
    ("with config: model=", "engine"),
    ("non-default args", "configuration"),
)


def stage(text: str) -> str:
    """How far a start has come, in a word or two."""
    return next((name for mark, name in STAGES if mark in text), "importing")


# Why a server did not start: what its log says, and a sentence. Groups of the pattern fill the sentence.
REASONS = (
    (
        r"max seq len \((\d+)\), \(([\d.]+) GiB KV cache is needed.*?estimated maximum model length is (\d+)",
        "too little KV memory: one request of max_model_len {0} does not fit, {2} tokens would: raise kv_cache_memory"
        " (or gpu_memory_utilization), or lower max_model_len",
    ),
    (
        r"No available memory for the cache blocks|max seq len \((\d+)\)",
        "too little KV memory: nothing is left for the KV cache: raise kv_cache_memory (or gpu_memory_utilization, or"
        " num_blocks where it is set)",
    ),
    (
        r"Available memory on node \d+ \(([^)]+)\).*?is less than (?:desired|requested)",
        "too little memory on this node ({0} are free): set kv_cache_memory, which does not ask for a share of it all",
    ),
    (
        r"Free memory on device \S+ \(([^)]+)\) on startup is less than",
        "too little GPU memory is free ({0}): lower gpu_memory_utilization, or end what else runs on the GPU",
    ),
    (
        r"No common block size for (\d+) \((\w+): \[(?:MultipleOf\()?([\d, ]+)",
        "block_size {0} is none that the attention backend {1} has kernels for: it takes multiples of {2}",
    ),
    (r"Address already in use", "the port is taken: name another one, or none, and a free one is found"),
    (
        r"HFValidationError: Repo id must .*: '([^']+)'",
        "there is no model in the folder {0}: no config.json was found there",
    ),
    (
        r"Invalid repository ID or local directory specified: '([^']+)'",
        "there is no model in the folder {0}: no config.json was found there",
    ),
    (
        r"Cannot find any model weights with `([^`]+)`",
        "there are no weights in the folder {0}: no *.safetensors was found there",
    ),
    (r"SafetensorError: (.+)", "a file of weights is broken ({0}): write or copy the model again"),
    (
        r"outgoing traffic has been disabled",
        "the model is no folder, and the hub's cache on this machine does not hold it: nothing is downloaded here",
    ),
    (
        r"max_model_len \((\d+)\) is greater than the derived max_model_len \(max_position_embeddings=([\d.]+)",
        "max_model_len {0} is more than the {1} positions that the model was made for",
    ),
    (
        r"Cannot find the config file for (\w+)",
        "quantization {0} was asked for, and the checkpoint says nothing of it: leave it out, or take a packed one",
    ),
    (r"unrecognized arguments: (.*)", "this vLLM does not know the arguments {0}"),
    (r"ModuleNotFoundError: (No module named '[^']+')", "{0}"),
)

# An exception that a process names, maybe after its name and place; of one that checked a configuration what it found.
ERROR = r"^(\(.*?\] )?\s*((?:[\w.]*(?:Error|Exception): |Value error, ).+)$"


def failure_reason(text: str) -> str:
    """One sentence on why the server of this log ended; its last error where the reason is none that we know."""
    for pattern, sentence in REASONS:
        if found := re.search(pattern, text, re.DOTALL if "GiB KV cache" in pattern else 0):
            return sentence.format(*found.groups())
    said = re.findall(ERROR, text, re.MULTILINE)
    if "EngineDeadError" in text:  # then other processes' errors were of single requests
        said = [(process, error) for process, error in said if re.search("EngineCore|Worker", process)]
    known = ("Engine core initialization failed", "EngineDeadError")
    root = [error.removeprefix("Value error, ") for _, error in said if not any(k in error for k in known)]
    root = [re.sub(r" \[type=\w+, input_value=.*", "", error) for error in root]  # the whole configuration
    if not root and any(sign in text for sign in known):
        return "its engine was ended from outside: the system does that where memory runs out"
    warned = re.compile(r"\s+warnings\.warn\(|.*\bresource_tracker\b")
    lines = [line for line in text.strip().splitlines() if not warned.match(line)]
    if not root and lines and re.search(r"^\(.*? pid=\d+\) (?:INFO|WARNING) ", lines[-1]):
        return f"it was ended from outside, and says nothing of why; its log ends with: {lines[-1].strip()[:200]}"
    return (root or lines or ["its log is empty"])[-1].strip()[:400]
