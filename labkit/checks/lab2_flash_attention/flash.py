"""FlashAttention: forward, causal, grouped, ragged."""

from __future__ import annotations

import itertools

import torch

from labkit import device, meter
from labkit.checks import traffic
from labkit.checks.contract import Question, require
from labkit.checks.lab2_flash_attention.cases import Case, agree, attention, framed, make_case
from labkit.checks.values import close, run_kernel

LAB = "lab2_flash_attention"
KERNELS = ("kernels.flash_attention", "kernels.flash_attention_hopper", "kernels.reference")


def _question(name: str, about: str) -> Question:
    return Question(name, LAB, about, KERNELS, traffic.TORCH_MATH, launches_kernels=True)


flash_forward = _question("flash_forward", "attention comes out right for any lengths, and no score goes to memory")
flash_causal = _question("flash_causal", "no row sees its future, and tiles that nobody sees are not loaded")
flash_grouped = _question(
    "flash_grouped", "query heads find their KV head, nothing is copied, and unseen tiles are skipped"
)
flash_varlen = _question("flash_varlen", "packed sequences do not see each other, and unseen tiles are skipped")


def _dtypes() -> list[torch.dtype]:
    """fp16 and fp32; bf16 only where it can be graded by value, since Triton's interpreter computes it wrongly."""
    return [torch.float16] + ([torch.bfloat16] if device.tier() == "cuda" else [])


INSIDE = "a kernel is launched, and every access is inside its tensor"


@flash_forward.invariant(INSIDE, stops=True)
def _(answer) -> None:
    traffic.stays_inside(answer, *make_case(65, 130, heads=2, seed=8).arguments)


@flash_causal.invariant(INSIDE, stops=True)
def _(answer) -> None:
    traffic.stays_inside(answer, *make_case(70, 130, heads=2, seed=9).arguments)


@flash_grouped.invariant(INSIDE, stops=True)
def _(answer) -> None:
    traffic.stays_inside(answer, *make_case(70, heads=4, kv_heads=2, seed=10).arguments)


@flash_varlen.invariant(INSIDE, stops=True)
def _(answer) -> None:
    case, cu = _packed([33, 0, 5], 4, 2, 30)
    traffic.stays_inside(answer, case.q, case.k, case.v, cu, 33, case.scale)


@flash_forward.invariant("one tile")
def _(answer) -> float:
    return agree(answer, make_case(64, seed=1), "64 rows, 64 columns, one tile: is it softmax(scale * q k^T) v?")


@flash_forward.invariant("lengths that do not divide by the tiles", share=2)
def _(answer) -> float:
    look_at = "lengths are no multiples of the tiles: are columns past seq_k masked, and rows past seq_q not written?"
    return max(
        agree(answer, make_case(a, b, seed=a), f"{a} queries, {b} keys: {look_at}")
        for a, b in ((1, 1), (65, 130), (17, 100))
    )


@flash_forward.invariant("a maximum that moves from tile to tile", share=2)
def _(answer) -> float:
    case = make_case(40, 256, loudness=3.0, rising=True, seed=2)
    return agree(answer, case, "later tiles score higher: are l and acc multiplied by alpha, and is m carried on?")


@flash_forward.invariant("large scores do not overflow")
def _(answer) -> float:
    return agree(
        answer, make_case(64, 128, loudness=60.0, seed=3), "scores of several hundred: is the maximum subtracted?"
    )


@flash_forward.invariant("small scores keep their base")
def _(answer) -> float:
    return agree(answer, make_case(64, 192, loudness=0.5, seed=4), "is every exponential in base e, scaled once?")


@flash_forward.invariant("heads, head_dim 128, other tiles, dtypes, a thousand keys")
def _(answer) -> float:
    ratios = []
    for dtype in _dtypes():
        case = make_case(48, 80, heads=3, head_dim=128, dtype=dtype, seed=5)
        ratios.append(agree(answer, case, f"{dtype}, 3 heads of 128, tiles of 32 and 16", block_m=32, block_n=16))
    # near-equal scores, so that the sum of one tile of 64 keys passes 65,504 as well
    look_at = "1,000 keys with values near 2,000: their weighted sum passes 65,504, so is it taken in fp32?"
    ratios.append(agree(answer, make_case(16, 1000, seed=6, loudness=0.1, offset=2000.0), look_at))
    return max(ratios)


@flash_forward.invariant("nothing but q, k, v and o moves", share=2)
def _(answer) -> float:
    case = make_case(128, heads=2, seed=7)
    count = traffic.stays_inside(answer, *case.arguments, block_m=64, block_n=64)
    bytes_ = case.q.numel() * 2 + 2 * (case.k.numel() + case.v.numel()) * 2  # K and V once for each of two row tiles
    stored = case.q.numel() * 2
    require(
        count.bytes_stored == stored, f"{count.bytes_stored} bytes stored, the output has {stored}: scores stay on chip"
    )
    require(
        count.bytes_loaded <= bytes_, f"{count.bytes_loaded} bytes loaded; q once and K, V once a row tile are {bytes_}"
    )
    return count.bytes_loaded / bytes_


@flash_causal.invariant("a row sees itself and what is before it", share=2)
def _(answer) -> float:
    case = make_case(64, causal=True, seed=11)
    return agree(answer, case, "one causal tile: row i sees columns 0 to i, itself included")


@flash_causal.invariant("lengths that do not divide by the tiles")
def _(answer) -> float:
    look_at = "causal: does the diagonal tile mask inside itself, and the loop reach the last column that a row sees?"
    cases = ((1, 64, 64), (100, 64, 64), (130, 32, 64), (90, 64, 16))
    return max(
        agree(
            answer, make_case(n, causal=True, seed=n), f"{n} rows, tiles {m} and {b}: {look_at}", block_m=m, block_n=b
        )
        for n, m, b in cases
    )


@flash_causal.invariant("fewer queries than keys: the queries are the last ones")
def _(answer) -> float:
    case = make_case(30, 100, causal=True, seed=12)
    return agree(answer, case, "30 queries over 100 keys: row i sees columns 0 to i + seq_k - seq_q")


@flash_causal.invariant("the future changes nothing")
def _(answer) -> None:
    case = make_case(96, causal=True, seed=13)
    before = run_kernel(answer, *case.arguments)[:50].clone()
    case.k[50:], case.v[50:] = 7.0, -9.0
    after = run_kernel(answer, *case.arguments)[:50]
    require(
        bool(torch.equal(before, after)), "rows 0 to 49 changed when keys from 50 on changed: a row sees its future"
    )


@flash_causal.invariant("tiles that no row sees are not loaded", share=2)
def _(answer) -> float:
    case = make_case(256, causal=True, seed=14)
    count = traffic.stays_inside(answer, *case.arguments, block_m=64, block_n=64)
    tiles = sum(range(1, 5))  # key tiles of 64 that the four row tiles of 64 see
    most = case.q.numel() * 2 + tiles * 2 * 64 * 64 * 2
    require(
        count.bytes_loaded <= most,
        f"{count.bytes_loaded} bytes loaded, {most} are enough: are tiles past the diagonal skipped?",
    )
    return count.bytes_loaded / most


@flash_causal.invariant("a maximum that moves, and large scores")
def _(answer) -> float:
    case = make_case(130, causal=True, loudness=4.0, rising=True, seed=15)
    return agree(answer, case, "later tiles score higher: are l and acc multiplied by alpha, and is m carried on?")


@flash_grouped.invariant("each group of query heads reads its own KV head", share=2)
def _(answer) -> float:
    case = make_case(70, heads=4, kv_heads=2, causal=True, seed=21)
    return agree(answer, case, "query head h reads KV head h // GROUP")


@flash_grouped.invariant("one group of eight, and no groups at all")
def _(answer) -> float:
    ratios = []
    for heads, kv_heads in ((8, 1), (2, 2)):
        case = make_case(33, 40, heads=heads, kv_heads=kv_heads, causal=True, seed=22)
        ratios.append(agree(answer, case, f"{heads} query heads, {kv_heads} KV heads", block_m=32, block_n=32))
    return max(ratios)


@flash_grouped.invariant("K and V are not copied")
def _(answer) -> None:
    case = make_case(64, heads=4, kv_heads=1, causal=True, seed=23)
    count = traffic.stays_inside(answer, case.q, case.k, case.v, case.scale)
    biggest = max((n for tally in count.kernels.values() for n in tally.stored.values()), default=0)
    require(
        count.bytes_stored == case.q.numel() * 2,
        f"{count.bytes_stored} bytes stored ({biggest} to one tensor): only o is written",
    )


def _skips_tiles(count: meter.Count, q: torch.Tensor, key_rows: int, more: int = 0) -> float:
    """Failed if more was loaded than q and `key_rows` rows of K and V, of one head each, in fp16. more: other bytes."""
    most = q.numel() * 2 + key_rows * 2 * q.shape[2] * 2 + more
    require(
        count.bytes_loaded <= most,
        f"{count.bytes_loaded} bytes loaded, {most} are enough: does the loop end with the last key tile that a row of "
        "the row tile sees, as in question 5?",
    )
    return count.bytes_loaded / most


@flash_grouped.invariant("tiles that no row sees are not loaded")
def _(answer) -> float:
    case = make_case(192, 256, heads=2, kv_heads=1, causal=True, seed=24)
    count = traffic.stays_inside(answer, *case.arguments, block_m=64, block_n=64)
    return _skips_tiles(count, case.q, 2 * (128 + 192 + 256))  # what each row tile sees, for each of two heads


def _packed(lengths: list[int], heads: int, kv_heads: int, seed: int) -> tuple[Case, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    total = sum(lengths)
    q = framed((total, heads, 64), g, torch.float16)
    k, v = (framed((total, kv_heads, 64), g, torch.float16) for _ in "kv")
    starts = [0, *torch.tensor(lengths).cumsum(0).tolist()]
    return Case(q, k, v, 0.125, causal=True), torch.tensor(starts, dtype=torch.int32, device=q.device)


def ragged(case: Case, starts: list[int], dtype: torch.dtype) -> torch.Tensor:
    """Dense attention within each sequence."""
    parts = [Case(case.q[a:b], case.k[a:b], case.v[a:b], case.scale, True) for a, b in itertools.pairwise(starts)]
    return torch.cat([attention(part, dtype) for part in parts])


def _ragged(answer, lengths: list[int], look_at: str, heads: int = 4, kv_heads: int = 2, seed: int = 31) -> float:
    case, cu = _packed(lengths, heads, kv_heads, seed)
    got = run_kernel(answer, case.q, case.k, case.v, cu, max(lengths), case.scale)
    starts = cu.tolist()
    return close(got, ragged(case, starts, torch.float64), ragged(case, starts, torch.float16), look_at)


@flash_varlen.invariant("one sequence")
def _(answer) -> float:
    return _ragged(answer, [50], "one sequence of 50: as question 6")


@flash_varlen.invariant("sequences do not see each other", share=2)
def _(answer) -> float:
    look_at = "lengths 33, 64, 1, 40: is begin added to rows and columns, and length, not the total, the mask?"
    return _ragged(answer, [33, 64, 1, 40], look_at, seed=32)


@flash_varlen.invariant("empty sequences, first, last and between")
def _(answer) -> float:
    return _ragged(
        answer,
        [0, 20, 0, 0, 35, 0],
        "a sequence without rows writes nothing, and the next begins where it does",
        seed=33,
    )


@flash_varlen.invariant("no access outside the tensors, and no work for tiles that are not there")
def _(answer) -> None:
    case, cu = _packed([96, *[31] * 6], 1, 1, 34)
    count = traffic.stays_inside(answer, case.q, case.k, case.v, cu, 96, case.scale, block_m=32, block_n=32)
    tiles = 9 + 6  # 3 times 3 for the long sequence, with those past the diagonal, and one for each short one
    most = case.q.numel() * 2 + tiles * 2 * 32 * 64 * 2 + 3 * 7 * 2 * 8
    require(
        count.bytes_loaded <= most,
        f"{count.bytes_loaded} bytes loaded, {most} are enough: do tiles past a sequence's end load?",
    )


@flash_varlen.invariant("tiles that no row of a sequence sees are not loaded")
def _(answer) -> float:
    case, cu = _packed([64, 96, 32], 2, 1, 35)
    count = traffic.stays_inside(answer, case.q, case.k, case.v, cu, 96, case.scale, block_m=32, block_n=32)
    seen = (32 + 64) + (32 + 64 + 96) + 32  # keys that the row tiles of each sequence see
    return _skips_tiles(count, case.q, 2 * seen, more=3 * 2 * 3 * 2 * 8)  # every program may read two of cu_seqlens


QUESTIONS = [flash_forward, flash_causal, flash_grouped, flash_varlen]
