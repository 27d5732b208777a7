"""What the repository says about the FlashAttention kernels' speed follows from the recorded rows."""

import math

import pytest

from labkit.benchmarks import evidence, flash_attention, paged_prefill
from tests.test_evidence import quoted

LENGTHS = (2048, 4096, 8192, 16384)


@pytest.fixture(scope="module")
def rows():
    return evidence.load(evidence.FOLDER / "flash_attention.nvidia-h200.json").rows


def speedups(rows, variant, peer, mask):
    """Over the peer, at head_dim 128 and 2k to 16k tokens, in order of length."""
    cases = [f"dense: batch {16384 // n} x {n}, 16/16 heads of 128, {mask}" for n in LENGTHS]
    found = {row.case: row for row in rows if row.variant == variant}
    return [found[case].ratio(peer) for case in cases]


def best(rows):
    """Case -> the better of our kernels over the best peer."""
    found = {}
    for row in rows:
        ratio = row.ours / max(row.peers.values())
        found[row.case] = max(ratio, found.get(row.case, 0.0))
    return found


def mean(values):
    values = list(values)
    return math.prod(values) ** (1 / len(values))


def test_no_case_is_left_out(rows):
    cases = [*flash_attention.dense(), *flash_attention.packed()]
    assert {row.case for row in rows} == {case.name for case in cases}
    assert {row.case for row in rows if row.variant == "tl"} == {case.name for case in cases}
    dense = {case.name for case in flash_attention.dense()}
    assert {row.case for row in rows if row.variant == "hopper"} == dense
    wanted = {case.name: set(case.peers) for case in cases}
    assert all(row.peers.keys() == wanted[row.case] for row in rows), "a peer is missing from a row"


@pytest.mark.parametrize(
    "variant, peer, title",
    [
        ("tl", "fa2", "tl to FlashAttention 2:"),
        ("tl", "cudnn", "tl to cuDNN:"),
        ("hopper", "cudnn", "hopper to cuDNN:"),
        ("hopper", "fa3", "hopper to FlashAttention 3:"),
    ],
)
def test_the_quoted_ratios_follow_from_the_rows(rows, variant, peer, title):
    expected = []
    for mask in ("full", "causal"):
        found = speedups(rows, variant, peer, mask)
        expected += [mean(found), min(found)]
    assert quoted(title)[:4] == pytest.approx(expected, abs=6e-4)


@pytest.mark.parametrize(
    "variant, peer, line",
    [
        ("tl", "fa2", "| `tl`, readable in one sitting | FlashAttention 2 |"),
        ("tl", "cudnn", "| `tl` | cuDNN |"),
        ("hopper", "fa3", "| Gluon for Hopper: TMA, warp specialisation | FlashAttention 3 |"),
        ("hopper", "cudnn", "| Gluon for Hopper | cuDNN |"),
    ],
)
def test_the_table_of_the_readme_follows_from_the_rows(rows, variant, peer, line):
    text = (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    [said] = [row for row in text.splitlines() if row.startswith(line)]
    means = [mean(speedups(rows, variant, peer, mask)) for mask in ("full", "causal")]
    assert said == f"{line} {means[0]:.3f}x | {means[1]:.3f}x |"


def test_the_quoted_worst_rows_are_the_worst(rows):
    found = best(rows)
    packed = [v for case, v in found.items() if case.startswith("packed")]
    rest = [v for case, v in found.items() if not case.startswith("packed")]
    assert quoted("Packed sequences to FlashAttention 3:")[0] == pytest.approx(min(packed), abs=6e-4)
    assert quoted("Everything else:")[0] == pytest.approx(min(rest), abs=6e-4)
    over_fa2 = [row.ratio("fa2") for row in rows if row.variant == "tl" and "fa2" in row.peers]
    said = quoted("FlashAttention 2 is beaten by `tl` least where a head of 96 is computed 128 wide:")
    assert said[0] == pytest.approx(min(over_fa2), abs=6e-4)


def test_the_kernels_are_not_slower_than_their_floors(rows):
    for mask in ("full", "causal"):
        assert min(speedups(rows, "tl", "fa2", mask)) >= 1.15
        assert min(speedups(rows, "hopper", "fa3", mask)) >= 0.85


@pytest.fixture(scope="module")
def paged():
    return evidence.load(evidence.FOLDER / "paged_prefill.nvidia-h200.json").rows


def test_no_case_of_paged_prefill_is_left_out(paged):
    wanted = {case.name: {"fa3_paged", "vllm_triton"} for case in paged_prefill.cases()}
    for variant in ("tl", "hopper"):
        assert {row.case: set(row.peers) for row in paged if row.variant == variant} == wanted


def test_the_quoted_ratios_of_paged_prefill_follow_from_the_rows(paged):
    peers = {"fa3_paged": "FlashAttention 3 with pages:", "vllm_triton": "vLLM's Triton kernel:"}
    for variant in ("hopper", "tl"):
        ratios = [row.ratio("fa3_paged") for row in paged if row.variant == variant]
        said = quoted(f"{variant} to FlashAttention 3 with pages:")[:2]
        assert said == pytest.approx([mean(ratios), min(ratios)], abs=6e-4)
    for peer, title in peers.items():
        cases = {row.case: 0.0 for row in paged}
        for row in paged:
            cases[row.case] = max(cases[row.case], row.ratio(peer))
        expected = [mean(cases.values()), min(cases.values())]
        assert quoted(f"The better of ours to {title}")[:2] == pytest.approx(expected, abs=6e-4)
        if peer == "fa3_paged":
            text = " ".join((evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8").split())
            assert f"Prefill over pages: {expected[0]:.3f}x of FlashAttention 3 with pages" in text
            assert f"{expected[1]:.3f}x in the worst case, heads of 256" in text
            assert min(cases.values()) >= 0.7


def test_a_causal_square_counts_half_its_pairs():
    full, half = (flash_attention.Case("x", (64, 32), (64, 32), causal, 2, 1, 8) for causal in (False, True))
    assert full.flops == 4 * (64**2 + 32**2) * 2 * 8 == 2 * half.flops
    prefix = flash_attention.Case("x", (64,), (256,), True, 1, 1, 8)
    assert prefix.flops == 4 * (64 * 256 - 64 * 64 / 2) * 8, "the keys before the queries are all seen"
