"""Ratios of one run, and the floor that an operation cannot get below."""

import json
from types import SimpleNamespace

import pytest

from labkit import races, roofline
from labkit.races import Race, race
from labkit.roofline import Ceilings, Work, ceilings, copy_work, decode_work, floor, matmul_work, prefill_work


@pytest.fixture
def on_cpu(monkeypatch):
    """Race with the CPU's timer, also where there is a GPU."""
    monkeypatch.setattr("labkit.device.tier", lambda: "interpreter")


def test_a_contestant_that_takes_a_third_of_the_time_is_three_times_as_fast(on_cpu, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(races.time, "perf_counter", lambda: now[0])  # a clock that only the contestants move

    def takes(seconds):
        def call():
            now[0] += seconds

        return call

    result = race({"slow": takes(0.375), "fast": takes(0.125)}, rounds=9)
    ratio = result.ratio("fast")
    assert ratio.value == ratio.low == ratio.high == 3.0
    assert result.ratio("slow", over="fast").value == pytest.approx(1 / 3)
    assert result.seconds["fast"] == (0.125,) * 9, "the warm-up rounds must not count"


def test_contestants_take_turns_and_their_order_changes(on_cpu, monkeypatch):
    monkeypatch.setattr(races, "CPU_CACHE_BYTES", 1)
    ran: list[str] = []
    race({name: lambda name=name: ran.append(name) for name in "abc"}, rounds=20, warm_up=1)
    turns = ["".join(ran[i : i + 3]) for i in range(0, len(ran), 3)]
    assert len(turns) == 21 and all(sorted(t) == list("abc") for t in turns), "each must run once a round"
    assert len(set(turns)) > 3, "the order must be drawn anew"


def test_the_cache_is_overwritten_before_each_call_unless_it_is_to_stay_warm(on_cpu, monkeypatch):
    events = []
    buffer = SimpleNamespace(fill_=lambda value: events.append("flush"))
    sizes = []
    monkeypatch.setattr(races.torch, "empty", lambda size, **options: sizes.append(size) or buffer)
    for cold in (True, False):
        race({name: lambda name=name: events.append(name) for name in "ab"}, rounds=5, cold=cold)
    assert sizes == [races.CPU_CACHE_BYTES, 0]
    assert events[::2] == ["flush"] * (len(events) // 2), "each call must find the cache as the others do"


def test_a_ratio_with_a_wide_interval_is_inconclusive_and_a_narrow_one_is_not():
    steady, noisy = (1.0,) * 9, (0.5, 1.5, 0.4, 1.8, 0.6, 2.0, 0.7, 1.1, 1.0)
    result = Race({"base": steady, "twice": (0.5,) * 9, "noisy": noisy}, "base", "CPU")
    assert result.ratio("twice").conclusive and str(result.ratio("twice")) == "2.00x (2.00 to 2.00)"
    assert not result.ratio("noisy").conclusive
    assert "inconclusive" in str(result) and "2.00x" in str(result)


def test_the_interval_holds_the_median_with_95_percent():
    assert [races._median_ranks(n) for n in (5, 9, 15, 25)] == [(0, 4), (1, 7), (3, 11), (7, 17)]


def test_the_ratio_is_taken_within_each_round_so_that_a_drift_does_not_count():
    drift = [1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0, 5.0]
    ratio = Race({"base": tuple(drift), "half": tuple(d / 2 for d in drift)}, "base", "CPU").ratio("half")
    assert (ratio.value, ratio.spread) == (2.0, 0.0)


@pytest.mark.parametrize(
    ("contestants", "options", "message"),
    [
        ({"a": int}, {}, "at least two, got 1"),
        ({"a": int, "b": int}, {"rounds": 3}, "rounds must be at least 5"),
        ({"a": int, "b": int}, {"baseline": "c"}, "no contestant 'c'; there are: a, b"),
    ],
)
def test_a_race_that_cannot_be_run_is_refused(contestants, options, message):
    with pytest.raises(ValueError, match=message):
        race(contestants, **options)


def test_an_unknown_contestant_is_named():
    with pytest.raises(KeyError, match="no contestant 'z'"):
        Race({"a": (1.0,) * 5, "b": (1.0,) * 5}, "a", "CPU").ratio("z")


H200 = Ceilings("NVIDIA H200", "1", 4.3e12, 4.1e12, {"bfloat16": 8e14})


def test_the_floor_of_a_decode_step_is_its_cache_over_the_bandwidth():
    work = decode_work([4096] * 64, 32, 8, 128)
    assert work.bytes == 2 * 8 * 128 * 2 * 64 * 4096 + 2 * 64 * 32 * 128 * 2
    assert work.flops == 4 * 32 * 128 * 64 * 4096
    assert work.intensity == pytest.approx(4, rel=0.01), "four query heads share each KV head"
    least = floor(work, H200, "bfloat16")
    assert least.bound == "memory"
    assert least.seconds == pytest.approx(250e-6, rel=0.01)


def test_pages_add_four_bytes_a_block_of_table():
    paged, flat = (decode_work([17, 16, 0], 8, 2, 64, block_size=b) for b in (16, None))
    assert paged.bytes - flat.bytes == 4 * 3


def test_the_floor_of_a_prefill_is_its_arithmetic():
    work = prefill_work(4, 4096, 32, 32, 128, causal=False)
    assert work.flops == 4 * 4 * 32 * 4096**2 * 128
    assert work.bytes == 2 * 4 * 4096 * 128 * 128
    assert floor(work, H200, "bfloat16").bound == "compute"
    assert prefill_work(4, 4096, 32, 32, 128).flops == pytest.approx(work.flops / 2, rel=1e-3)


def test_a_copy_and_a_matmul_count_each_byte_once():
    assert (copy_work(100).bytes, copy_work(100).flops) == (400, 0)
    assert (matmul_work(2, 3, 5).bytes, matmul_work(2, 3, 5).flops) == (2 * (10 + 15 + 6), 60)
    assert floor(copy_work(10**9), H200).seconds == pytest.approx(4e9 / 4.3e12)


def test_a_dtype_without_a_measured_peak_is_refused():
    with pytest.raises(ValueError, match="no peak of 'float16' was measured on NVIDIA H200, only bfloat16"):
        floor(Work("w", 1, 1), H200)


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """The ceilings of this machine, measured into an empty cache on small buffers."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    whole = roofline._bandwidths
    monkeypatch.setattr(roofline, "_bandwidths", lambda elements, where: whole(1 << 22, where))
    return tmp_path


def test_ceilings_are_measured_once_and_cached_by_device_and_driver(measured, monkeypatch):
    first = ceilings()
    assert first.read > 1e8 and first.copy > 1e8 and first.flops["float32"] > 1e8
    (file,) = (measured / "inference-camp").glob("ceilings-*.json")
    monkeypatch.setattr(roofline, "_measure", lambda *identity: pytest.fail("measured again"))
    assert ceilings() == first
    monkeypatch.setattr(roofline, "_identity", lambda: ("another GPU", "550.1"))
    with pytest.raises(pytest.fail.Exception):
        ceilings()
    assert file.name.startswith("ceilings-")


def test_a_broken_cache_file_is_measured_anew(measured):
    ceilings()
    (file,) = (measured / "inference-camp").glob("ceilings-*.json")
    for broken in ("{", json.dumps({"device": "x"})):
        file.write_text(broken)
        assert ceilings().read > 1e8
    assert json.loads(file.read_text())["read"] > 1e8
