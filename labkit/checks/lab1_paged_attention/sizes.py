"""How big a KV cache is."""

from labkit.checks.contract import Question, require
from labkit.models import ModelShape

LAB = "lab1_paged_attention"

kv_bytes = Question(
    "kv_bytes_per_token", LAB, "one token's K and V are counted for every KV head of every layer that attends"
)


@kv_bytes.invariant("plain multi-head attention: K and V, every layer, every head")
def _(answer) -> None:
    shape = ModelShape("MHA", 32, 32, 32, 128, 32)
    got, want = answer(shape, 2), 2 * 32 * 32 * 128 * 2
    require(got == want, f"{got} bytes for 32 layers of 32 heads, {want} expected: are both K and V counted?")


@kv_bytes.invariant("grouped queries: KV heads count, query heads do not")
def _(answer) -> None:
    shape = ModelShape("GQA", 36, 32, 8, 128, 36)
    got, want = answer(shape, 2), 2 * 36 * 8 * 128 * 2
    require(got == want, f"{got} bytes with 8 KV heads, {want} expected: only KV heads are stored")


@kv_bytes.invariant("hybrid: only layers that attend have a KV cache")
def _(answer) -> None:
    shape = ModelShape("hybrid", 64, 24, 4, 256, 16)
    got, want = answer(shape, 2), 2 * 16 * 4 * 256 * 2
    require(got == want, f"{got} bytes for 16 attention layers of 64, {want} expected: which layers keep K and V?")


QUESTIONS = [kv_bytes]
