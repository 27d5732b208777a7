"""How big a KV cache is, how many requests fit, and what is wasted."""

from __future__ import annotations

import random

from labkit.checks.contract import Question, require
from labkit.models import ModelShape
from labkit.workload import Request

LAB = "lab1_paged_attention"

kv_bytes_per_token = Question(
    "kv_bytes_per_token", LAB, "one token's K and V are counted for every KV head of every layer that attends"
)


@kv_bytes_per_token.invariant("multi-head attention: K and V, every layer, every head")
def _(answer) -> None:
    got, want = answer(_shape(32, 32, 32, 128, 32), 2), 2 * 32 * 32 * 128 * 2
    require(got is not None, "nothing was returned")
    require(got == want, f"{got} bytes for 32 layers of 32 heads, {want} expected: are both K and V counted?")


@kv_bytes_per_token.invariant("grouped queries: KV heads count, query heads do not")
def _(answer) -> None:
    got, want = answer(_shape(36, 32, 8, 128, 36), 2), 2 * 36 * 8 * 128 * 2
    require(got == want, f"{got} bytes with 32 query and 8 KV heads, {want} expected: only KV heads are stored")


@kv_bytes_per_token.invariant("hybrid: only layers that attend have a KV cache")
def _(answer) -> None:
    got, want = answer(_shape(64, 24, 4, 256, 16), 2), 2 * 16 * 4 * 256 * 2
    require(got == want, f"{got} bytes for 16 attention layers of 64, {want} expected: which layers keep K and V?")


@kv_bytes_per_token.invariant("the size of a stored number is a parameter")
def _(answer) -> None:
    shape = _shape(8, 8, 2, 64, 8)
    got, want = (answer(shape, 1), answer(shape, 4)), (2 * 8 * 2 * 64, 8 * 8 * 2 * 64)
    require(got == want, f"{got} bytes in fp8 and fp32, {want} expected: is dtype_bytes used?")


def _shape(layers: int, heads: int, kv_heads: int, head_dim: int, attention_layers: int) -> ModelShape:
    return ModelShape("check", layers, heads, kv_heads, head_dim, attention_layers)


requests_that_fit = Question(
    "requests_that_fit", LAB, "a request takes whole blocks, and what is left of the pool serves nobody"
)


@requests_that_fit.invariant("without blocks, it is memory over the size of a request")
def _(answer) -> None:
    got = answer(1000, 2, 100, 1)
    require(got == 5, f"{got} requests of 200 bytes in 1000 bytes, 5 expected")


@requests_that_fit.invariant("a request takes whole blocks")
def _(answer) -> None:
    got = [answer(100 * 16, 1, tokens, 16) for tokens in (15, 16, 17)]
    require(got == [100, 100, 50], f"{got} requests of 15, 16, 17 tokens in 100 blocks of 16, [100, 100, 50] expected")


@requests_that_fit.invariant("a request that does not fit whole does not count")
def _(answer) -> None:
    got = answer(100, 2, 17, 16)
    require(
        got == 1, f"{got} requests of 17 tokens in 100 bytes at 2 bytes a token: 2 of 3 blocks of 16 serve one, so 1"
    )


@requests_that_fit.invariant("a memory that cannot hold one request holds none")
def _(answer) -> None:
    got = answer(16 * 10 - 1, 10, 1, 16)
    require(got == 0, f"{got} requests where not even one block fits, 0 expected")


reservation_waste = Question(
    "reservation_waste",
    LAB,
    "waste is measured over all steps, and a request that is too long is refused",
)


@reservation_waste.invariant("the example of the docstring")
def _(answer) -> None:
    _near(
        answer([Request(0, 0.0, 2, 2)], 10),
        0.65,
        "one request 2 in, 2 out, 10 reserved: does step t use prompt_len + t?",
    )


@reservation_waste.invariant("short questions with long answers")
def _(answer) -> None:
    want = 1 - (20 + 250.5) / 2048
    _near(answer([Request(i, 0.0, 20, 500) for i in range(3)], 2048), want, "20 in, 500 out, 2048 reserved")


@reservation_waste.invariant("a long request weighs more than a short one")
def _(answer) -> None:
    trace = [Request(0, 0.0, 1, 1), Request(1, 0.0, 1, 99)]
    want = 1 - (2 + sum(range(2, 101))) / (100 * 100)
    _near(answer(trace, 100), want, "requests of 1 and 99 steps: sum over all steps, then divide once")


@reservation_waste.invariant("a request longer than the reservation is refused by its id")
def _(answer) -> None:
    try:
        got = answer([Request(7, 0.0, 60, 50)], 100)
    except ValueError as error:
        require("7" in str(error), f"the ValueError does not name request 7: {error}")
        return
    require(False, f"request 7 needs 110 tokens where 100 are reserved, and the answer was {got}, not a ValueError")


paged_waste = Question("paged_waste", LAB, "only the empty part of a request's last block is counted as waste")


@paged_waste.invariant("the example of the docstring")
def _(answer) -> None:
    _near(answer([Request(0, 0.0, 2, 2)], 4), 0.125, "one request 2 in, 2 out, block 4: how many tokens at step 1?")


@paged_waste.invariant("blocks of one token waste nothing, a block that is just full needs no other")
def _(answer) -> None:
    _near(answer([Request(0, 0.0, 20, 500)], 1), 0.0, "block size 1")
    _near(answer([Request(0, 0.0, 14, 2)], 16), 1 - 31 / 32, "14 in, 2 out, block 16: 15 and 16 tokens in one block")
    _near(answer([Request(0, 0.0, 15, 1)], 16), 0.0, "15 in, 1 out, block 16: 16 tokens fill one block")


@paged_waste.invariant("random traces agree with a count step by step")
def _(answer) -> None:
    rng = random.Random(5)
    for block_size in (4, 16, 448):
        trace = [Request(i, 0.0, rng.randint(1, 90), rng.randint(1, 120)) for i in range(20)]
        used = held = 0
        for r in trace:
            for tokens in range(r.prompt_len + 1, r.prompt_len + r.output_len + 1):
                used += tokens
                held += (tokens + block_size - 1) // block_size * block_size
        _near(answer(trace, block_size), 1 - used / held, f"20 random requests, block {block_size}")


def _near(got: float, want: float, what: str) -> None:
    require(got is not None, f"{what}: nothing was returned")
    require(isinstance(got, (int, float)), f"{what}: a number was expected, not {type(got).__name__}")
    require(abs(got - want) < 1e-9, f"{what}: waste {got:.6f}, {want:.6f} expected")


QUESTIONS = [kv_bytes_per_token, requests_that_fit, reservation_waste, paged_waste]
