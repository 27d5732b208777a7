"""Figures show what they were given, whole and legible."""

import json
import subprocess
import sys

import matplotlib

matplotlib.use("Agg")

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.patches import Rectangle

from labkit import plots
from labkit.access_map import AccessMap
from labkit.plots import recorded
from labkit.plots.graph_sizes import padding_chart
from labkit.pooltrace import Snapshot
from labkit.races import Race
from labkit.roofline import Ceilings, Work, floor

POOL = Snapshot(7, 4, ((0, 1), (0,), (1,), (), (2,), ()), (4, 3, 1, 0, 4, 0), (0, 1, 2), (3,), "")


@pytest.fixture(autouse=True)
def closed():
    yield
    plt.close("all")


def texts(figure):
    """All words of a figure that a reader sees."""
    figure.canvas.draw()
    return [t for t in figure.findobj(matplotlib.text.Text) if t.get_text().strip() and t.get_visible()]


def assert_legible(figure):
    """No word is cut off by the edge of the figure, and no two words of the axes lie on one another."""
    words = texts(figure)
    renderer, edge = figure.canvas.get_renderer(), figure.bbox
    shown = {}
    for word in words:
        box = word.get_window_extent(renderer)
        inside = edge.x0 - 1 <= box.x0 and box.x1 <= edge.x1 + 1 and edge.y0 - 1 <= box.y0 and box.y1 <= edge.y1 + 1
        axis_label_out_of_range = box.width == 0 or not box.overlaps(edge)
        assert inside or axis_label_out_of_range, f"{word.get_text()!r} is cut off at {box}"
        shown[word] = box
    drawn = [w for w in figure.axes[0].texts if w in shown]
    for n, one in enumerate(drawn):
        for other in drawn[n + 1 :]:
            assert not shown[one].overlaps(shown[other]), f"{one.get_text()!r} lies on {other.get_text()!r}"


def said(figure):
    return [t.get_text() for t in texts(figure)]


def test_a_memory_map_draws_every_block_with_its_owners_and_says_what_is_free_and_wasted():
    figure = plots.memory_map(POOL)
    words = said(figure)
    assert "step 7: 3 running, 1 waiting; 2 of 6 blocks free, 4 slots reserved and empty" in words
    assert {"0, 1", "0", "1", "2"} <= set(words)
    assert {"tokens of a request", "shared by several", "reserved, empty", "free"} <= set(words)
    assert_legible(figure)


def test_a_memory_map_fills_a_block_as_far_as_it_holds_tokens_and_hatches_shared_ones():
    patches = [p for p in plots.memory_map(POOL).axes[0].patches if isinstance(p, Rectangle)]
    hatched = [p for p in patches if p.get_hatch()]
    assert len(hatched) == 1 and hatched[0].get_x() == 0, "block 0 alone is shared"
    widths = {
        round(p.get_x()): p.get_width()
        for p in patches
        if p.get_facecolor()[:3] == matplotlib.colors.to_rgb(plots.colour(1))
    }
    assert widths[2] == pytest.approx(0.88 / 4), "block 2 of request 1 holds one token of four"


def test_a_memory_map_of_another_size_keeps_its_blocks_apart():
    assert_legible(plots.memory_map(Snapshot(0, 16, ((0, 1, 2, 3, 4),) * 50, (9,) * 50, (0,), (), "")))
    with pytest.raises(ValueError, match="one entry a block"):
        plots.memory_map(Snapshot(0, 4, ((0,),), (1, 2), (0,), (), ""))


def test_waste_is_drawn_with_a_line_a_law_and_the_marks_beside_one_another():
    sizes = [1, 8, 16, 32, 64, 128, 256, 448, 832]
    waste = {law: [0.001 * s**0.95 for s in sizes] for law in ("constant 20/500", "Poisson", "geometric", "log-normal")}
    figure = plots.waste_by_block_size(
        sizes, waste, marks={16: "default", 448: "hybrid, bf16 state", 832: "hybrid, fp32 state"}
    )
    assert len([line for line in figure.axes[0].lines if len(line.get_xdata()) == 9]) == 4
    assert {"832", "448", "16", "1", "constant 20/500"} <= set(said(figure))
    assert figure.axes[0].get_ylim()[1] > max(map(max, waste.values()))
    assert_legible(figure)
    with pytest.raises(ValueError, match="waste\\['short'\\] has 1 values for 9 block sizes"):
        plots.waste_by_block_size(sizes, {"short": [0.1]})


def test_bars_write_their_values_out():
    figure = plots.bars({"block 16": 0.02, "reserve 2,048": 0.868}, unit="share")
    assert {"0.02", "0.868", "block 16", "share"} <= set(said(figure))
    assert_legible(figure)
    with pytest.raises(ValueError, match="nothing to draw"):
        plots.bars({})


def test_a_race_is_drawn_as_ratios_and_an_inconclusive_one_is_grey_and_says_so():
    race = Race(
        {"peer": (2.0,) * 9, "ours": (1.0,) * 9, "noisy": (0.5, 1.5, 0.4, 1.8, 0.6, 2, 0.7, 1.1, 1)}, "peer", "CPU"
    )
    figure = race.chart()
    words = said(figure)
    assert {"2.00x", "1.00x", "noisy\n(inconclusive)", "times as fast as peer"} <= set(words)
    faces = [p.get_facecolor()[:3] for p in figure.axes[0].patches]
    assert faces[0] == faces[1] != faces[2]
    assert_legible(figure)


def test_a_roofline_places_points_at_their_intensity_and_share_of_the_roof():
    on = Ceilings("some GPU", "1", 4e12, 4e12, {"float16": 8e14})
    decode, matmul = Work("decode", 10**9, 8 * 10**9), Work("matmul", 10**9, 10**12)
    figure = plots.roofline_chart(
        on, [(w, floor(w, on).seconds * slower) for w, slower in ((decode, 2), (matmul, 1.25))], "float16"
    )
    assert {"decode: 50% of its roof", "matmul: 80% of its roof", "memory-bound"} <= set(said(figure))
    assert_legible(figure)
    with pytest.raises(ValueError, match="no peak of 'int8' was measured on some GPU, only float16"):
        plots.roofline_chart(on, [], "int8")
    with pytest.raises(ValueError, match="copy does no FLOPs"):
        plots.roofline_chart(on, [(Work("copy", 1, 0), 1.0)], "float16")


ROWS = [
    {
        "case": "1 x 8k",
        "unit": "TB/s",
        "better": "higher",
        "ours": 2.0,
        "peers": {"fa3_paged": 1.0, "vllm_triton": 4.0},
    },
    {"case": "64 x 4k", "unit": "us", "better": "lower", "ours": 2.0, "peers": {"fa3_paged": 3.0}},
]


@pytest.fixture
def evidence(tmp_path, monkeypatch):
    run = {"benchmark": "paged_attention", "gpu": "NVIDIA H200", "date": "2026-11-30", "rows": ROWS}
    (tmp_path / "paged_attention.h200.json").write_text(json.dumps(run))
    monkeypatch.setattr(recorded, "FOLDER", tmp_path)


def test_recorded_runs_are_drawn_as_ratios_the_worst_case_on_top(evidence):
    figure = plots.evidence_chart("paged_attention")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["1 x 8k", "64 x 4k"]
    assert {
        "FlashAttention 3, paged",
        "vLLM's Triton kernel",
        "paged_attention on NVIDIA H200: 2 cases",
    } <= set(said(figure))
    assert_legible(figure)
    few = plots.evidence_chart("paged_attention", gpu="h200", most=1)
    assert "the 1 worst of 2 cases" in few.get_suptitle()


def test_only_the_rows_of_a_variant_and_a_unit_are_drawn(evidence, tmp_path):
    rows = [
        {**ROWS[0], "variant": "mine", "unit": "ms"}, {**ROWS[1], "variant": "mine"}, {**ROWS[1], "variant": "other"},
    ]  # fmt: skip
    run = {"benchmark": "vllm", "gpu": "NVIDIA H200", "rows": rows}
    (tmp_path / "vllm.h200.json").write_text(json.dumps(run))
    assert len(plots.evidence_chart("vllm").axes[0].get_yticks()) == 3
    figure = plots.evidence_chart("vllm", variant="mine", unit="ms")
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["1 x 8k"], "one variant need not be named"
    assert figure.get_suptitle() == "vllm on NVIDIA H200, ms: 1 cases"
    assert "no run of 'vllm'" in said(plots.evidence_chart("vllm", variant="third"))[0]


def test_padding_is_drawn_on_one_scale_in_all_panels():
    figure = padding_chart({3: 10, 20: 1}, {"wide": [32], "fitted": [3, 20]})
    first, second = figure.axes
    assert first.get_ylim() == second.get_ylim(), "grey areas of two panels cannot be compared"
    assert max(p.get_y() + p.get_height() for p in first.patches) <= first.get_ylim()[1]
    assert "fitted: 2 sizes, 0.0%" in second.get_title(loc="left")


def test_an_advantage_is_above_one_whichever_way_is_better():
    assert recorded.advantages(ROWS[0]) == {"fa3_paged": 2.0, "vllm_triton": 0.5}
    assert recorded.advantages(ROWS[1]) == {"fa3_paged": 1.5}
    assert recorded.advantages({**ROWS[0], "unit": "% padded rows", "ours": 0.0}) == {}, "a share is no speed"


def test_a_run_that_is_not_recorded_is_said_with_those_that_are(evidence):
    (words,) = said(plots.evidence_chart("engine"))
    assert words == "no run of 'engine' is recorded in labkit/evidence; recorded are: paged_attention.h200.json"


def test_labkit_imports_without_matplotlib():
    hide = "import sys; sys.modules['matplotlib'] = sys.modules['ipywidgets'] = None"
    rest = "import labkit, labkit.meter, labkit.races, labkit.roofline, labkit.workload, labkit.models, labkit.device"
    done = subprocess.run([sys.executable, "-c", f"{hide}; {rest}"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_occupancy_falls_with_registers_and_shared_memory_and_marks_say_their_warps():
    figure = plots.occupancy_chart("sm_90", 128, {"attention": (153, 114688), "softmax": (40, 1024)})
    assert {"attention: 8 warps", "softmax: 48 warps", "registers a thread", "shared memory a block (KiB)"} <= set(
        said(figure)
    )
    assert_legible(figure)
    warps = figure.axes[0].collections[0].get_array()
    assert warps[0, 0] == 64 and warps[-1, -1] == 4, "from everything on one SM to one block of four warps"
    with pytest.raises(ValueError, match="arch"):
        plots.occupancy_chart("sm_70", 128)


@pytest.fixture
def access():
    loaded = np.zeros((6, 12), int)
    loaded[4:6, 8:12], loaded[4, 0] = 1, 2
    sums = np.array([1, 1, 0, 0])
    maps = {"x_ptr": loaded, "sums_ptr": sums}, {"out_ptr": np.eye(6, dtype=int), "sums_ptr": sums}
    return AccessMap("tile_kernel", (2, 2, 1), (1, 1, 0), *maps, ())


def test_an_access_map_is_drawn_a_tensor_a_panel_and_coloured_by_what_was_done(access):
    figure = plots.access_chart(access)
    words = said(figure)
    assert {"tile_kernel, program (1, 1, 0)", "x_ptr [6, 12]", "sums_ptr [4]", "out_ptr [6, 6]"} <= set(words)
    assert {"untouched", "loaded once", "loaded again", "stored", "loaded and stored"} <= set(words)
    x, sums, out = (axes.images[0].get_array() for axes in figure.axes)
    assert (x[4, 0], x[5, 11], x[0, 0]) == (2, 1, 0)
    assert sums.tolist() == [[4, 4, 0, 0]] and out[0, 0] == 3
    assert_legible(figure)


def test_an_access_map_of_a_large_tensor_loses_no_touched_element():
    lone = np.zeros((5000, 3, 2000), int)
    lone[4321, 1, 1234] = 1
    figure = plots.access_chart(AccessMap("k", (1, 1, 1), (0, 0, 0), {"x": lone}, {}, ()))
    drawn = figure.axes[0].images[0].get_array()
    assert drawn.shape == (256, 512) and drawn.sum() == 1


def test_a_program_that_touches_nothing_has_no_map():
    with pytest.raises(ValueError, match="touches no tensor"):
        plots.access_chart(AccessMap("k", (1, 1, 1), (0, 0, 0), {}, {}, ()))


def test_a_ladder_chart_shows_the_best_choice_and_names_the_others_with_their_figures():
    made = plots.ladder_chart({1: 0.6, 4: 0.2, 9: 0.08}, {"powers of two": (8, 0.28), "every 8": (19, 0.06)})
    assert_legible(made)
    assert "powers of two: 8, 28.0%" in said(made) and "every 8: 19, 6.0%" in said(made)
    assert list(made.axes[0].lines[0].get_xdata()) == [1, 4, 9]
    with pytest.raises(ValueError, match="best: there is nothing to draw"):
        plots.ladder_chart({})
