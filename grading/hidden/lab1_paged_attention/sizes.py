"""Hidden checks of lab 1: sizes and waste.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import random

from grading.blackbox import Remote, hidden_check, require

LAB = "lab1_paged_attention"


@hidden_check(LAB, "kv_bytes_per_token")
def unseen_shapes(remote: Remote) -> None:
    def kv_bytes(layers: int, kv_heads: int, head_dim: int, attending: int, size: int) -> int:
        from labkit.models import ModelShape

        shape = ModelShape("unseen", layers, 4 * kv_heads, kv_heads, head_dim, attending)
        return kv_bytes_per_token(shape, size)

    for layers, kv_heads, head_dim, attending, size in ((17, 3, 96, 17, 2), (1, 1, 64, 1, 4), (61, 11, 256, 7, 1)):
        got = remote.call(kv_bytes, layers, kv_heads, head_dim, attending, size)
        want = 2 * attending * kv_heads * head_dim * size
        require(got == want, f"{got} bytes for {attending} of {layers} layers of {kv_heads} KV heads, {want} expected")


@hidden_check(LAB, "requests_that_fit")
def many_pools(remote: Remote) -> None:
    rng = random.Random(11)
    for _ in range(12):
        memory, per_token = rng.randint(1, 10**7), rng.choice([2, 100, 4096])
        tokens, block = rng.randint(1, 3000), rng.choice([1, 7, 16, 832])
        want = memory // (per_token * block) // ((tokens + block - 1) // block)
        got = remote.call("requests_that_fit", memory, per_token, tokens, block)
        require(
            got == want, f"{got} requests of {tokens} tokens in {memory} bytes with blocks of {block}, {want} expected"
        )


def trace_of(seed: int, longest: int) -> list[list[int]]:
    """Random (prompt_len, output_len) pairs."""
    rng = random.Random(seed)
    return [[rng.randint(1, longest), rng.randint(1, longest)] for _ in range(15)]


def on_trace(function: str, pairs: list[list[int]], size: int) -> float | str:
    """Driver: call a waste function on a trace; the name of the error if it raises."""
    from labkit.workload import Request

    try:
        return float(globals()[function]([Request(i, 0.0, p, o) for i, (p, o) in enumerate(pairs)], size))
    except ValueError as error:
        return f"ValueError: {error}"


@hidden_check(LAB, "reservation_waste")
def waste_of_reservations(remote: Remote) -> None:
    pairs = trace_of(3, 200)
    used = sum(p + t for p, o in pairs for t in range(1, o + 1))
    got = remote.call(on_trace, "reservation_waste", pairs, 777)
    want = 1 - used / (777 * sum(o for _, o in pairs))
    require(abs(got - want) < 1e-9, f"a random trace wastes {want:.6f}, the answer is {got}")
    refused = remote.call(on_trace, "reservation_waste", [[1, 1], [5, 5]], 9)
    require(
        str(refused).startswith("ValueError") and "1" in refused,
        "a request of 10 tokens in 9 was not refused by its id",
    )


@hidden_check(LAB, "paged_waste")
def waste_of_blocks(remote: Remote) -> None:
    for seed, block in ((4, 1), (5, 16), (6, 100), (7, 832)):
        pairs = trace_of(seed, 300)
        used = sum(p + t for p, o in pairs for t in range(1, o + 1))
        held = sum(-(-(p + t) // block) * block for p, o in pairs for t in range(1, o + 1))
        got, want = remote.call(on_trace, "paged_waste", pairs, block), 1 - used / held
        require(abs(got - want) < 1e-9, f"blocks of {block} waste {want:.6f} on a random trace, the answer is {got}")
