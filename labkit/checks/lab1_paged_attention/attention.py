"""Writing K and V through slots, and reading them back through block tables."""

from __future__ import annotations

import torch

from labkit import device, meter
from labkit.checks import compare
from labkit.checks.contract import Question, require
from labkit.checks.lab1_paged_attention.cases import GARBAGE, agree, make_case

LAB = "lab1_paged_attention"
KERNELS = ("kernels.paged_attention", "kernels.split_kv", "kernels.kv_cache", "kernels.reference")
SDPA = ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.attention", "torch.ops")

write_kv = Question(
    "write_kv", LAB, "K and V land in their slots, through any strides, and nothing else changes", KERNELS
)


def _write_case(slots: list[int], num_blocks: int = 5, block_size: int = 4, seed: int = 0):
    g = torch.Generator().manual_seed(seed)
    where = device.name()
    both = torch.full((num_blocks, 2, block_size, 2, 64), GARBAGE, device=where)
    k, v = (torch.randn(len(slots), 2, 64, generator=g).to(where) for _ in "kv")
    expected = both.clone()
    for row, slot in enumerate(slots):
        if slot >= 0:
            expected[slot // block_size, 0, slot % block_size] = k[row]
            expected[slot // block_size, 1, slot % block_size] = v[row]
    return k, v, both, torch.tensor(slots, dtype=torch.int64, device=where), expected


def _written(answer, slots: list[int], look_at: str) -> None:
    k, v, both, mapping, expected = _write_case(slots)
    answer(k, v, both[:, 0], both[:, 1], mapping)
    compare.equal(both[:, 0], expected[:, 0], "k_cache", look_at)
    compare.equal(both[:, 1], expected[:, 1], "v_cache", look_at)


@write_kv.invariant("tokens land in their slots, across a block border, in a strided cache")
def _(answer) -> None:
    _written(
        answer,
        [6, 7, 8, 17],
        "slots 6, 7, 8, 17 with block_size 4: block = slot // block_size, offset = slot % block_size",
    )


@write_kv.invariant("padding is not written")
def _(answer) -> None:
    _written(answer, [3, -1, 0, -1], "slot -1 is padding: index -1 is the last block, which must stay as it was")


@write_kv.invariant("a step with no real token changes nothing")
def _(answer) -> None:
    _written(answer, [-1, -1], "all slots are -1")
    _written(answer, [], "no tokens at all")


gather_attention = Question(
    "gather_attention", LAB, "attention through a block table equals attention over dense K and V", KERNELS, SDPA
)
paged_decode = Question(
    "paged_decode", LAB, "the kernel equals dense attention and reads every K and V once", KERNELS, SDPA,
    launches_kernels=True,
)  # fmt: skip
split_decode = Question(
    "split_decode", LAB, "the splits of a sequence, combined, equal dense attention, empty ones too", KERNELS, SDPA,
    launches_kernels=True,
)  # fmt: skip


def _dtypes() -> list[torch.dtype]:
    """fp32 and fp16; bf16 only where it can be graded by value, since Triton's interpreter computes it wrongly."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device.tier() == "cuda" else [])


def _values(question: Question) -> None:
    """The invariants of value that all three attention questions share."""

    @question.invariant("one short sequence")
    def _(answer) -> float:
        return agree(
            answer, make_case([5], seed=1), "one sequence of 5 tokens in one block: is the score scale * q k^T?"
        )

    @question.invariant("lengths around a block border, in scattered blocks", share=2)
    def _(answer) -> float:
        case = make_case([1, 15, 16, 17, 40], seed=2)
        return agree(
            answer, case, "the last block is partly filled: are the lanes past seq_len masked, and only those?"
        )

    @question.invariant("grouped queries", share=2)
    def _(answer) -> float:
        case = make_case([19, 7], num_heads=8, num_kv_heads=2, seed=3)
        return agree(answer, case, "grouped queries: query head h reads KV head h // (num_heads // num_kv_heads)")

    @question.invariant("scores that grow along the sequence")
    def _(answer) -> float:
        case = make_case([70], num_heads=1, num_kv_heads=1, loudness=4.0, rising=True, seed=4)
        look_at = (
            "the largest score grows from block to block: is what was summed before multiplied by exp(m_old - m_new)?"
        )
        return agree(answer, case, look_at)

    @question.invariant("large scores do not overflow")
    def _(answer) -> float:
        case = make_case([33, 50], loudness=60.0, seed=5)
        return agree(answer, case, "scores of several hundred: is the largest one subtracted before exp?")

    @question.invariant("empty sequences give zeros, an empty batch gives an empty result")
    def _(answer) -> float:
        none = make_case([], seed=6)
        require(
            tuple(answer(*none.arguments).shape) == (0, 2, 64), "a batch of no sequences must give shape (0, 2, 64)"
        )
        return agree(answer, make_case([0, 9, 0], seed=6), "a sequence of length 0 must give zeros: what is 0 / 0?")

    @question.invariant("dtypes, head_dim 128, another block size, a thousand tokens")
    def _(answer) -> float:
        ratios = []
        for dtype in _dtypes():
            case = make_case([100, 37], head_dim=128, block_size=32, dtype=dtype, seed=7)
            ratios.append(agree(answer, case, f"{str(dtype).removeprefix('torch.')}, head_dim 128, block_size 32"))
        case = make_case([1000], num_heads=1, num_kv_heads=1, seed=8)
        return max([*ratios, agree(answer, case, "1,000 tokens in fp16: is everything summed in fp32?")])


for _question in (gather_attention, paged_decode, split_decode):
    _values(_question)


def _reads_once(answer, **options) -> float:
    """Counted traffic: the ratio of bytes loaded to K and V counted once, which must be near 1."""
    case = make_case([40, 16, 21], num_heads=8, num_kv_heads=2, dtype=torch.float16, seed=10)
    count = meter.measure(answer, *case.arguments, **options)
    require(count.launches > 0, "no Triton kernel was launched: this question asks for a kernel")
    require(not count.outside, f"an access outside its tensor: {count.outside[0] if count.outside else ''}")
    once = 2 * sum(k.nbytes for k, _ in case.dense)
    rest = case.q.nbytes + case.block_table.nbytes + 64 * case.seq_lens.nbytes  # every program reads a length and a q
    ratio = count.bytes_loaded / once
    require(count.bytes_loaded >= once, f"the kernel loads {count.bytes_loaded} bytes, and K and V alone have {once}")
    most = once + rest * (1 + options.get("num_splits", 0))
    require(
        count.bytes_loaded <= most,
        f"the kernel loads {ratio:.2f} times K and V: each must be read once, for its whole group of heads",
    )
    return count.bytes_loaded / most


paged_decode.invariant("every K and V is read once, inside its tensor", share=2)(_reads_once)
split_decode.invariant("every K and V is read once, inside its tensor", share=2)(
    lambda answer: _reads_once(answer, num_splits=3)
)


@split_decode.invariant("more splits than blocks, one split, and splits of unequal size")
def _(answer) -> float:
    case = make_case([1, 20, 120], num_heads=4, num_kv_heads=2, seed=9)
    look_at = "every block belongs to one split, and a split without blocks has weight 0"
    return max(agree(answer, case, f"{look_at}, num_splits={n}", num_splits=n) for n in (1, 3, 8))


QUESTIONS = [write_kv, gather_attention, paged_decode, split_decode]
