"""What the repository says about the int4 product and quantized caches follows from the recorded rows."""

import pytest

from labkit.benchmarks import evidence, int4_matmul, kv_cache
from labkit.benchmarks.evidence import geometric_mean
from tests.test_evidence import quoted

PEERS = {"bf16": "bf16", "marlin": "Marlin", "machete": "Machete"}
SPANS = {"Up to 16 tokens": (1, 16), "32 to 256 tokens": (32, 256), "512 and 1,024 tokens": (512, 1024)}


def rows(name):
    return evidence.load(evidence.FOLDER / f"{name}.nvidia-h200.json").rows


def readme():
    return (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8").splitlines()


def tokens(row):
    return int(row.case.split()[0])


def speedups(peer, span):
    low, high = SPANS[span]
    return [row.ratio(peer) for row in rows("int4_matmul") if low <= tokens(row) <= high]


def over_1_gb(kind):
    large = {case.name for case in kv_cache.cases() if case.bytes > 10**9 and case.context >= 8192}
    return [row.ratio("own_bf16") for row in rows("kv_cache") if row.variant == kind and row.case in large]


def test_no_case_and_no_peer_is_left_out():
    wanted = {case.name: set(PEERS) for case in int4_matmul.cases()}
    assert {row.case: set(row.peers) for row in rows("int4_matmul")} == wanted
    for kind in kv_cache.KINDS:
        assert {r.case for r in rows("kv_cache") if r.variant == kind} == {case.name for case in kv_cache.cases()}


@pytest.mark.parametrize("span", SPANS)
@pytest.mark.parametrize("peer", PEERS)
def test_the_quoted_ratios_of_the_int4_product_follow_from_the_rows(span, peer):
    found = speedups(peer, span)
    said = quoted(f"{span}, to {PEERS[peer]}:")[:2]
    assert said == pytest.approx([geometric_mean(found), min(found)], abs=6e-4)
    [line] = [
        line for line in readme() if line.startswith(f"| int4 product, {span[0].lower()}{span[1:]} | {PEERS[peer]}")
    ]
    assert f"| {geometric_mean(found):.3f}x | {min(found):.3f}x |" in line


def test_the_quoted_worst_row_of_the_int4_product_is_the_worst():
    worst = min(min(row.ratio(peer) for peer in PEERS) for row in rows("int4_matmul"))
    assert quoted("The worst row of the int4 product, to the best peer:")[0] == pytest.approx(worst, abs=6e-4)


@pytest.mark.parametrize("kind", kv_cache.KINDS)
def test_the_quoted_ratios_of_quantized_caches_follow_from_the_rows(kind):
    found = over_1_gb(kind)
    assert quoted(f"{kind}, K and V over 1 GB:")[:2] == pytest.approx([geometric_mean(found), min(found)], abs=6e-4)
    [line] = [line for line in readme() if line.startswith(f"| decode over a KV cache in {kind}")]
    assert f"| {geometric_mean(found):.3f}x | {min(found):.3f}x |" in line


def test_the_quoted_worst_rows_of_quantized_caches_are_the_worst():
    worst = min(row.ratio("own_bf16") for row in rows("kv_cache"))
    assert quoted("The worst row of quantized caches:")[0] == pytest.approx(worst, abs=6e-4)
