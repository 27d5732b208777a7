"""Writing K and V through slots, and reading them back through block tables."""

from __future__ import annotations

import math

import torch

from labkit import device
from labkit.access_map import map_accesses
from labkit.checks import compare, traffic, values
from labkit.checks.contract import Question, require
from labkit.checks.lab1_paged_attention import cases
from labkit.checks.lab1_paged_attention.cases import Case, k_view, make_case, v_view
from labkit.meter import Call

LAB = "lab1_paged_attention"
KERNELS = ("kernels.paged_attention", "kernels.split_kv", "kernels.kv_cache", "kernels.reference")
SDPA = ("torch.nn.functional.scaled_dot_product_attention", "torch.nn.attention", "torch.ops")

write_kv = Question(
    "write_kv", LAB, "K and V land in their slots, through any strides, and nothing else changes", KERNELS
)


def _written(answer, slots: list[int], look_at: str) -> None:
    """Write random tokens to `slots` of strided caches of five blocks of four, and compare the whole caches."""
    g = torch.Generator().manual_seed(0)
    where = device.name()
    k, v = (torch.randn(len(slots), 2, 64, generator=g).to(where) for _ in "kv")
    caches = k_view((5, 4, 2, 64), torch.float32), v_view((5, 4, 2, 64), torch.float32)
    expected = [cache.clone() for cache in caches]
    for row, slot in enumerate(slots):
        if slot >= 0:
            for cache, new in zip(expected, (k, v), strict=True):
                cache[slot // 4, slot % 4] = new[row]
    before = caches[0].clone()
    answer(k, v, *caches, torch.tensor(slots, dtype=torch.int64, device=where))
    if torch.equal(caches[0], before) and not torch.equal(before, expected[0]):
        require(False, "k_cache is unchanged: was a copy written? `.reshape` of a strided view is one")
    for name, cache, want in zip(("k_cache", "v_cache"), caches, expected, strict=True):
        compare.equal(cache, want, name, look_at)


@write_kv.invariant("tokens land in their slots, slot 0 too, across a block border, in strided caches")
def _(answer) -> None:
    look_at = "slots 6, 7, 8, 17, 0 with block_size 4: block = slot // block_size, offset = slot % block_size"
    _written(answer, [6, 7, 8, 17, 0], look_at)


@write_kv.invariant("padding is not written")
def _(answer) -> None:
    _written(answer, [3, -1, 5, -1], "slot -1 is padding: index -1 is the last block, which must stay as it was")
    _written(answer, [9, -2, -7], "every negative slot is padding, -2 and -7 too")


@write_kv.invariant("a step with no real token changes nothing, among steps that do")
def _(answer) -> None:
    _written(answer, [-1, -1], "all slots are -1")
    _written(answer, [], "no tokens at all")
    _written(answer, [11], "one token")


gather_attention = Question(
    "gather_attention", LAB, "attention through a block table equals attention over dense K and V", KERNELS, SDPA
)
paged_decode = Question(
    "paged_decode", LAB, "the kernel equals dense attention and reads every K and V once", KERNELS, traffic.TORCH_MATH,
    launches_kernels=True,
)  # fmt: skip
split_decode = Question(
    "split_decode", LAB, "the splits of a sequence, combined, equal dense attention, empty ones too", KERNELS,
    traffic.TORCH_MATH,
    launches_kernels=True,
)  # fmt: skip


def _dtypes() -> list[torch.dtype]:
    """fp32 and fp16; bf16 only where it can be graded by value, since Triton's interpreter computes it wrongly."""
    return [torch.float32, torch.float16] + ([torch.bfloat16] if device.tier() == "cuda" else [])


def _reads_once(answer, **options: int) -> None:
    """Counted traffic: K and V once, and little else; entries past the end of the block table lead nowhere."""
    case = make_case([40, 16, 21], num_heads=8, num_kv_heads=2, seed=10, meaningful=False)
    count = traffic.stays_inside(answer, *case.arguments, **options)
    once = 2 * sum(k.nbytes for k, _ in case.dense)
    q_and_tables = case.q.numel() * case.q.element_size() + case.block_table.nbytes + 64 * case.seq_lens.nbytes
    most = once + q_and_tables * (1 + options.get("num_splits", 0))  # every program reads a length and its q
    what = "K and V are read once, for the whole group of heads; are lanes past seq_len masked in the load?"
    traffic.reads_once(count, once, most, what)
    least = case.q.numel() * case.q.element_size()
    require(count.bytes_stored >= least, f"the kernel stores {count.bytes_stored} bytes, and the output has {least}")


for _question, _options in ((paged_decode, {}), (split_decode, {"num_splits": 3})):
    _question.invariant("a kernel reads every K and V once, inside its tensors", share=2, stops=True)(
        lambda answer, options=_options: _reads_once(answer, **options)
    )


def _values(question: Question, refused: set[str] | None) -> None:
    """The invariants of value that all three attention questions share. refused: see `values.run`."""

    def agree(answer, case: Case, look_at: str) -> float:
        return cases.agree(answer, case, look_at, refused)

    @question.invariant("one short sequence")
    def _(answer) -> float:
        look_at = (
            "one sequence of 5 tokens in one block: is the score scale * q k^T, and has each of q, K, V its strides?"
        )
        return agree(answer, make_case([5], num_heads=3, num_kv_heads=3, seed=1), look_at)

    @question.invariant("scores that grow along the sequence")
    def _(answer) -> float:
        case = make_case([64], num_heads=1, num_kv_heads=1, loudness=4.0, rising=True, seed=4)
        look_at = (
            "the largest score grows from block to block: is what was summed before multiplied by exp(m_old - m_new)?"
        )
        return agree(answer, case, look_at)

    @question.invariant("lengths around a block border, in scattered blocks", share=2)
    def _(answer) -> float:
        case = make_case([1, 15, 16, 17, 40], seed=2)
        look_at = "the last block is partly filled: are the lanes past seq_len masked, and only those?"
        return agree(answer, case, look_at)

    @question.invariant("grouped queries", share=2)
    def _(answer) -> float:
        case = make_case([19, 7], num_heads=8, num_kv_heads=2, seed=3)
        return agree(answer, case, "grouped queries: query head h reads KV head h // (num_heads // num_kv_heads)")

    @question.invariant("large scores do not overflow")
    def _(answer) -> float:
        case = make_case([33, 50], loudness=60.0, seed=5)
        return agree(answer, case, "scores of several hundred: is the largest one subtracted before exp?")

    @question.invariant("empty sequences give zeros, an empty batch gives an empty result")
    def _(answer) -> float:
        none = tuple(answer(*make_case([], seed=6).arguments).shape)
        require(none == (0, 2, 64), f"a batch of no sequences gave shape {none}, (0, 2, 64) expected")
        return agree(answer, make_case([0, 9, 0], seed=6), "a sequence of length 0 must give zeros: what is 0 / 0?")

    @question.invariant("dtypes, head_dim 128, another block size, a thousand tokens")
    def _(answer) -> float:
        ratios = []
        for dtype in _dtypes():
            case = make_case([100, 37], head_dim=128, block_size=32, dtype=dtype, seed=7)
            ratios.append(agree(answer, case, f"{str(dtype).removeprefix('torch.')}, head_dim 128, block_size 32"))
        case = make_case([1000], num_heads=1, num_kv_heads=1, seed=8, offset=2000.0)
        look_at = (
            "1,000 tokens in fp16 with values near 2,000: their weighted sum passes 65,504, so is it taken in fp32?"
        )
        return max([*ratios, agree(answer, case, look_at)])


_values(gather_attention, None)
_values(paged_decode, values.PRODUCTS | values.REDUCTIONS)
_values(split_decode, values.PRODUCTS)  # its parts are combined in torch


@gather_attention.invariant("entries of the block table past a sequence's end are not followed")
def _(answer) -> float:
    return cases.agree(
        answer, make_case([3, 40], seed=11, meaningful=False), "entries past a sequence's last block are no ids"
    )


@split_decode.invariant("combine_splits weighs partial outputs by their lse")
def _(answer) -> float:
    combine = answer.__globals__.get("combine_splits")
    require(callable(combine), "the cell defines no combine_splits")
    g = torch.Generator().manual_seed(12)
    o, lse = torch.randn(2, 5, 3, 8, generator=g), torch.randn(2, 5, 3, generator=g) * 40 + 200
    lse[:, 3], o[:, 3] = -math.inf, 0.0
    weight = torch.softmax(lse.double(), dim=1)
    want = (weight.unsqueeze(-1) * o.double()).sum(1)
    got = combine(o.to(device.name()), lse.to(device.name())).cpu()
    error = (got.double() - want).abs().max().item()
    require(error < 1e-4, f"five parts with lse near 200, one of them -inf: the largest error is {error:.3g}")
    return error / 1e-4


@split_decode.invariant("every split does its share")
def _(answer) -> None:
    case = make_case([128], num_heads=2, num_kv_heads=1, seed=13)
    call = Call(answer, case.arguments, {"num_splits": 4})
    total = 2 * case.dense[0][0].numel()
    for split in range(4):
        access = map_accesses(call, program=(0, 0, split))
        read = sum(int((n > 0).sum()) for name, n in access.loaded.items() if n.ndim == 4)
        require(
            read == total // 4, f"split {split} of 4 reads {read} elements of K and V, a quarter of {total} expected"
        )


@split_decode.invariant("more splits than blocks, one split, and splits of unequal size")
def _(answer) -> float:
    case = make_case([1, 20, 120], num_heads=4, num_kv_heads=2, seed=9)
    look_at = "every block belongs to one split, and a split without blocks has weight 0"
    return max(
        cases.agree(answer, case, f"{look_at}, num_splits={n}", values.PRODUCTS, num_splits=n) for n in (1, 3, 8)
    )


QUESTIONS = [write_kv, gather_attention, paged_decode, split_decode]
