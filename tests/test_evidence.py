import json
import math
import re

import pytest

from labkit.benchmarks import evidence

FILES = sorted(evidence.FOLDER.glob("*.json"))
BATCHES = [1, 2, 4, 8, 16, 32, 64, 128, 256]
CONTEXTS = [512, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072]


def paged():
    return evidence.load(evidence.FOLDER / "paged_attention.nvidia-h200.json")


def grid_rows():
    """(batch, context) -> row, read off the file with nothing of the benchmark's own code."""
    found = {}
    for row in json.loads((evidence.FOLDER / "paged_attention.nvidia-h200.json").read_text())["rows"]:
        match = re.fullmatch(r"grid: batch (\d+) x (\d+), 32/8 heads of 128, block 16", row["case"])
        if match:
            found[int(match[1]), int(match[2])] = row
    return found


def quoted(sentence):
    """The numbers of the sentence that begins like this in the evidence's notes."""
    text = " ".join((evidence.FOLDER / "README.md").read_text(encoding="utf-8").split())
    assert sentence in text, f"labkit/evidence/README.md no longer says: {sentence}"
    return [float(n) for n in re.findall(r"\d+\.\d+", text.split(sentence)[1].split(". ")[0])]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_an_evidence_file_is_in_the_format_and_named_after_what_it_holds(path):
    found = evidence.load(path)
    assert path.name == found.file_name
    assert found.rows and len({(row.case, row.unit, row.variant) for row in found.rows}) == len(found.rows)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found.date)
    assert {"python", "torch", "triton"} <= found.versions.keys()
    for row in found.rows:
        share = row.unit.startswith("%")  # only a share may be 0
        assert (row.ours > 0 or (share and row.ours == 0)) and 0 <= row.spread < 2, row.case
        assert row.peers and all(value > 0 or (share and value == 0) for value in row.peers.values()), row.case


def test_no_batch_and_context_is_left_out():
    assert grid_rows().keys() == {(b, c) for b in BATCHES for c in CONTEXTS}


def test_the_quoted_mean_and_minimum_follow_from_the_rows():
    speedups = [row["ours"] / row["peers"]["fa3_paged"] for row in grid_rows().values()]
    mean = math.prod(speedups) ** (1 / len(speedups))
    said_mean, said_worst = quoted("Against FlashAttention 3 with pages:")[:2]
    assert said_mean == pytest.approx(mean, abs=6e-4) and said_worst == pytest.approx(min(speedups), abs=6e-4)
    ours = evidence.ratios([row for row in paged().rows if row.case.startswith("grid")], "fa3_paged")
    assert evidence.geometric_mean(list(ours.values())) == pytest.approx(mean)


@pytest.mark.parametrize(
    ("line", "peer"),
    [
        ("FlashAttention 3 with pages", "fa3_paged"),
        ("vLLM's Triton attention", "vllm_triton"),
        ("gather, then SDPA", "sdpa_gather"),
    ],
)
def test_the_table_of_the_readme_follows_from_the_rows(line, peer):
    text = (evidence.FOLDER.parents[1] / "README.md").read_text(encoding="utf-8")
    [said] = [row for row in text.splitlines() if f"| {line} |" in row]
    ratios = {k: r["ours"] / r["peers"][peer] for k, r in grid_rows().items() if peer in r["peers"]}
    worst = min(ratios, key=ratios.__getitem__)
    mean = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
    assert said.endswith(f"| {mean:.3f}x | {ratios[worst]:.3f}x, batch {worst[0]} x {worst[1]} |"), (
        f"README says: {said}"
    )


def test_the_other_quoted_ratios_follow_from_the_rows():
    speedups = [row["ours"] / row["peers"]["vllm_triton"] for row in grid_rows().values()]
    mean = math.prod(speedups) ** (1 / len(speedups))
    assert quoted("Against vLLM's Triton kernel:")[:2] == pytest.approx([mean, min(speedups)], abs=6e-4)
    rows = {row.case: row for row in paged().rows}
    skewed = rows["skewed: 1 x 131072 + 31 x 4096, 32/8 heads of 128, block 16"]
    peers = ("fa3_paged", "static_split_1", "static_split_16", "static_split_64")
    said = quoted("One 128k sequence beside 31 of 4k:")
    assert said == pytest.approx([skewed.ratio(peer) for peer in peers], abs=6e-4)
    small = [rows[f"block size: batch 16 x {n}, 32/32 heads of 128, block 8"] for n in (128, 2000, 4000)]
    said = quoted("Block size 8, MHA of 32 heads, batch 16:")
    assert said == pytest.approx([row.ratio("fa3_paged") for row in small], abs=6e-4)


def test_the_kernel_is_not_slower_than_its_floor():
    speedups = [row["ours"] / row["peers"]["fa3_paged"] for row in grid_rows().values()]
    assert math.prod(speedups) ** (1 / len(speedups)) >= 0.85
    assert min(speedups) >= 0.6


def test_the_quoted_share_of_bandwidth_follows_from_the_rows():
    shares = [
        row["ours"] / row["peers"]["read_ceiling"]
        for (batch, context), row in grid_rows().items()
        if batch * context * 4096 > 512 * 2**20
    ]
    assert quoted("Of the read bandwidth, where K and V exceed 512 MB:")[:2] == [
        pytest.approx(100 * min(shares), abs=0.06),
        pytest.approx(100 * max(shares), abs=0.06),
    ]


def test_a_file_with_a_key_too_many_is_refused_by_name(tmp_path):
    data = json.loads(FILES[0].read_text())
    data["rows"][3]["note"] = "fast"
    path = tmp_path / "x.json"
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=r"x\.json: row 3 has the keys .*note"):
        evidence.load(path)
    path.write_text(json.dumps(data | {"extra": 1}))
    with pytest.raises(ValueError, match="expected the keys benchmark, gpu"):
        evidence.load(path)


def test_what_is_written_is_read_back_alike(tmp_path):
    path = tmp_path / "copy.json"
    paged().write(path)
    assert evidence.load(path) == paged()
    assert len(path.read_text().splitlines()) > len(paged().rows), "one row a line keeps differences readable"


@pytest.mark.parametrize("better, expected", [("higher", 2.0), ("lower", 0.5)])
def test_a_ratio_above_one_is_a_win_whichever_way_the_unit_counts(better, expected):
    assert evidence.Row("case", "unit", better, 4.0, {"peer": 2.0}, 0.0).ratio("peer") == expected
