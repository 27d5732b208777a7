"""How many tokens and requests a launch line holds."""

from __future__ import annotations

from labkit.checks.contract import Question, require
from labkit.models import LLAMA_2_7B, LLAMA_3_1_8B, QWEN3_0_6B, QWEN3_8B, ModelShape
from labkit.serve.recording import read_recording

LAB = "lab5_vllm_serving"
GIB = 1 << 30

kv_capacity = Question("kv_capacity", LAB, "memory becomes whole blocks, and blocks become whole requests",
                       ("labkit.serve.plan",))  # fmt: skip


def expected(
    shape: ModelShape, memory: float, fixed: int, block_size: int, length: int, size: int
) -> tuple[int, float]:
    """(tokens of KV cache, requests of `length` that fit), as vLLM counts."""
    block_bytes = block_size * shape.attention_layers * 2 * shape.num_kv_heads * shape.head_dim * size
    blocks = int(memory - fixed) // block_bytes
    concurrency = blocks / -(-length // block_size)
    return int(concurrency * length), concurrency


CASES = [
    (QWEN3_8B, 72 * GIB, 18 * GIB, 16, 16384, 2),
    (LLAMA_3_1_8B, 20 * GIB, 17 * GIB, 16, 8192, 2),
    (QWEN3_0_6B, 10 * GIB, 2 * GIB, 32, 4096, 1),
    (LLAMA_2_7B, 24 * GIB, 14 * GIB, 16, 4096, 2),
]


def _agrees(answer, case: tuple, look_at: str) -> None:
    tokens, concurrency = answer(*case)
    want = expected(*case)
    name = f"{case[0].name}, {_size(case[1])} of which {_size(case[2])} are taken, blocks of {case[3]}"
    require(
        abs(concurrency - want[1]) < 1e-9 * want[1],
        f"{name}: {concurrency:.4f} requests of {case[4]:,} tokens, {want[1]:.4f} expected: {look_at}",
    )
    require(
        tokens == want[0],
        f"{name}: {tokens:,} tokens, {want[0]:,} expected: vLLM reports concurrency * max_model_len, rounded down",
    )


def _size(num_bytes: float) -> str:
    return f"{num_bytes / GIB:g} GiB" if num_bytes >= GIB else f"{num_bytes:,} bytes"


@kv_capacity.invariant("real models", share=2)
def _(answer) -> None:
    for case in CASES:
        _agrees(answer, case, "are K and V of every attending layer and KV head counted, and what is taken left out?")


@kv_capacity.invariant("layers that do not attend keep no KV cache")
def _(answer) -> None:
    hybrid = ModelShape("a hybrid, 8 of whose 32 layers attend", 32, 16, 2, 256, 8)
    _agrees(
        answer, (hybrid, 20 * GIB, 8 * GIB, 400, 40000, 2), "linear attention and state spaces keep a state instead"
    )


@kv_capacity.invariant("a request takes whole blocks")
def _(answer) -> None:
    _agrees(answer, (QWEN3_8B, 30 * GIB, 17 * GIB, 64, 1000, 2), "1,000 tokens take 16 blocks of 64, the last not full")


@kv_capacity.invariant("the cache is cut into whole blocks")
def _(answer) -> None:
    shape = ModelShape("small", 2, 4, 2, 64, 2)
    _agrees(answer, (shape, 3 * 32 * 1024 + 32 * 1023, 0, 32, 32, 2), "memory for 3.999 blocks is memory for 3")


@kv_capacity.invariant("a server that really ran")
def _(answer) -> None:
    facts = read_recording("lab5_cpu")["facts"]
    logged = (facts["kv_tokens"], facts["max_concurrency"])
    tiny = ModelShape("tiny", 4, 4, 2, 64, 4)
    tokens, concurrency = answer(tiny, 40 * 32 * 2048, 0, 32, 512, 2)
    require(
        (tokens, concurrency) == logged,
        f"{tokens:,} tokens and {concurrency} requests; its log says {logged[0]:,} and {logged[1]}",
    )


def _refused(answer, case: tuple, what: str) -> None:
    try:
        got = answer(*case)
    except ValueError as error:
        said = " ".join(str(error).split())
        require(len(said.split()) > 2, f"{what}: the ValueError's message is {said!r}: say what does not fit into what")
        return
    except AssertionError:
        require(False, f"{what}: an AssertionError, a ValueError with the reason expected: `python -O` asserts nothing")
    require(False, f"{what}: the answer was {got!r}, a ValueError expected, as vLLM does not start")


@kv_capacity.invariant("what cannot start is refused")
def _(answer) -> None:
    _refused(answer, (QWEN3_8B, 16 * GIB, 17 * GIB, 16, 1024, 2), "the weights alone take more than there is")
    _refused(answer, (QWEN3_8B, 18 * GIB, 17 * GIB, 16, 16384, 2), "not one request of max_model_len fits")
    exact = 1024 * 36 * 4096
    tokens, concurrency = answer(QWEN3_8B, exact, 0, 16, 1024, 2)
    require((tokens, concurrency) == (1024, 1.0), f"exactly one request fits: {tokens} tokens, {concurrency} requests")


QUESTIONS = [kv_capacity]
