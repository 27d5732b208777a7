"""What a log says."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.checks.lab5_vllm_serving.cases import cpu_log, gpu_log
from labkit.serve.recording import read_recording

LAB = "lab5_vllm_serving"

server_facts = Question("server_facts", LAB, "a log's facts come out as numbers, and what it does not say as None",
                        ("labkit.serve.log",))  # fmt: skip
FACTS = ("kv_tokens", "max_concurrency", "max_model_len", "block_size", "attention_backend", "cudagraph_mode")


def _facts(answer, text: str, where: str, **expected) -> None:
    got = answer(text)
    require(isinstance(got, dict), f"{where}: a dict was expected, not {type(got).__name__}")
    missing, unknown = [n for n in FACTS if n not in got], [n for n in got if n not in FACTS]
    require(not missing, f"{where}: the dict lacks {', '.join(missing)}; what a log does not state is there as None")
    require(not unknown, f"{where}: the dict has {', '.join(map(str, unknown))} besides the six facts")
    for name, want in expected.items():
        value = got[name]
        if None not in (value, want):
            kinds = type(value).__name__, type(want).__name__
            require(kinds[0] == kinds[1], f"{name} of {where} is {value!r}, of type {kinds[0]}: {kinds[1]} expected")
        require(value == want, f"{name} of {where} is {value!r}, {want!r} expected: {LOOK_AT[name]}")


LOOK_AT = {
    "kv_tokens": "thousands are separated by commas, and what is wanted is the size, not the length of a request",
    "max_concurrency": "it stands before an x, and may be below 1,000 with a fraction",
    "max_model_len": "it is the max_seq_len of the engine's config",
    "block_size": "asked for it stands among the non-default args; chosen it is announced, and then that one holds; "
    "else the log is silent",
    "attention_backend": "a GPU's log says which it uses; a CPU's does not",
    "cudagraph_mode": "the name behind CUDAGraphMode",
}


@server_facts.invariant("the log of a server on a CPU", share=2)
def _(answer) -> None:
    _facts(
        answer, cpu_log(), "a CPU's log", kv_tokens=32768, max_concurrency=32.0, max_model_len=1024,
        attention_backend=None, cudagraph_mode="NONE",
    )  # fmt: skip
    _facts(answer, cpu_log(1_234_567, 1205.63, 1024), "a large one", kv_tokens=1234567, max_concurrency=1205.63)


@server_facts.invariant("the block size, asked for or not")
def _(answer) -> None:
    _facts(answer, cpu_log(block_size=32), "a log with --block-size 32", block_size=32)
    _facts(answer, cpu_log(), "a log that names no block size", block_size=None)
    _facts(answer, gpu_log(asked=32), "a log in which 32 was asked for and 400 taken", block_size=400)


@server_facts.invariant("the log of a server on a GPU, with a hybrid model")
def _(answer) -> None:
    _facts(
        answer, gpu_log(), "a GPU's log", kv_tokens=789696, max_concurrency=19.28, max_model_len=40960, block_size=400,
        attention_backend="FLASH_ATTN", cudagraph_mode="FULL_AND_PIECEWISE",
    )  # fmt: skip


@server_facts.invariant("the recorded log of a server that really ran")
def _(answer) -> None:
    recorded = read_recording("lab5_cpu")
    _facts(answer, recorded["log"], "the recorded log", **{name: recorded["facts"][name] for name in FACTS})


@server_facts.invariant("a log that ends before the engine is up")
def _(answer) -> None:
    _facts(answer, "INFO importing\n", "an early log", **dict.fromkeys(FACTS))
    head = cpu_log(length=2048).partition("(EngineCore pid=95) INFO 11-30 07:53:53")[0]
    _facts(
        answer, head, "a log with the engine's config and no KV cache yet", kv_tokens=None, max_concurrency=None,
        max_model_len=2048, cudagraph_mode="NONE",
    )  # fmt: skip


QUESTIONS = [server_facts]
