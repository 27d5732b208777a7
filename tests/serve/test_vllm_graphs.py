"""What vLLM's dispatcher says, and sizes that fit the traffic."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from importlib.util import find_spec

import pytest

from labkit import workload
from labkit.serve import graphs
from labkit.serve.graphs import Budget, Dispatch, Dispatcher
from labkit.workload import Request

needs_vllm = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its dispatcher cannot be asked")
SIZES = [1, 2, 4, 8, 16]
# mode -> what becomes of: 3 decodes, 9 decodes, 9 tokens with a prefill, 17 tokens with a prefill
EXPECTED = {
    "NONE": ["NONE 3", "NONE 9", "NONE 9", "NONE 17"],
    "PIECEWISE": ["PIECEWISE 4", "PIECEWISE 16", "PIECEWISE 16", "NONE 17"],
    "FULL": ["FULL 4", "FULL 16", "FULL 16", "NONE 17"],
    "FULL_DECODE_ONLY": ["FULL 4", "FULL 16", "NONE 9", "NONE 17"],
    "FULL_AND_PIECEWISE": ["FULL 4", "FULL 16", "PIECEWISE 16", "NONE 17"],
}


@needs_vllm
@pytest.mark.parametrize("mode", graphs.MODES)
def test_each_mode_pads_and_falls_back_as_vllm_does(mode):
    dispatcher = Dispatcher(mode, SIZES, max_num_seqs=16)
    got = [dispatcher.dispatch(n, decode=d) for n, d in ((3, True), (9, True), (9, False), (17, False))]
    assert [f"{d.mode} {d.padded}" for d in got] == EXPECTED[mode]


@needs_vllm
def test_a_size_is_captured_twice_only_where_decodes_have_graphs_of_their_own():
    captured = {mode: len(Dispatcher(mode, SIZES, max_num_seqs=16).graphs) for mode in graphs.MODES}
    assert captured == {"NONE": 0, "PIECEWISE": 5, "FULL": 5, "FULL_DECODE_ONLY": 5, "FULL_AND_PIECEWISE": 10}


@needs_vllm
def test_a_dispatcher_is_asked_for_whole_numbers_of_tokens():
    for options in ({"max_num_seqs": 0}, {"max_num_seqs": "4"}, {"max_num_seqs": 4, "query_len": 0}):
        with pytest.raises(ValueError, match="must be a whole number of at least 1"):
            Dispatcher("FULL", SIZES, **options)
    for tokens in (0, -1, 1.5, "3"):
        with pytest.raises(ValueError, match="num_tokens must be"):
            Dispatcher("FULL", SIZES, max_num_seqs=4).dispatch(tokens, decode=True)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_num_seqs must be"):
        graphs.stock_sizes(0)


@needs_vllm
def test_no_decode_graph_is_larger_than_the_most_requests():
    dispatcher = Dispatcher("FULL_AND_PIECEWISE", SIZES, max_num_seqs=8)
    assert Dispatch("FULL", 16) not in dispatcher.graphs and Dispatch("PIECEWISE", 16) in dispatcher.graphs


@needs_vllm
def test_the_padded_share_is_the_same_whether_vllm_is_asked_or_not():
    batches = {1: 4, 3: 10, 9: 2, 20: 5}
    asked = Dispatcher("FULL_AND_PIECEWISE", SIZES, max_num_seqs=32).padded_share(batches)
    assert asked == pytest.approx(graphs.padded_share(batches, SIZES))
    assert asked == pytest.approx(1 - (4 + 30 + 18 + 100) / (4 + 40 + 32 + 100))


@needs_vllm
def test_vllms_own_sizes_are_every_eighth_up_to_twice_the_requests():
    assert graphs.stock_sizes(16) == [1, 2, 4, 8, 16, 24, 32]
    assert graphs.stock_sizes(1024)[-2:] == [496, 512], "512 is the limit, in steps of 16 from 256 on"


@needs_vllm
def test_the_model_runner_of_gpus_pads_as_the_dispatcher_says(monkeypatch):
    """vLLM has a second dispatcher, in its newer model runner; what is asked here is the first."""
    from types import SimpleNamespace

    manager = pytest.importorskip("vllm.v1.worker.gpu.cudagraph_utils", reason="this vLLM has one model runner only")
    from vllm.config import CUDAGraphMode

    monkeypatch.setattr(manager, "current_platform", SimpleNamespace(get_global_graph_pool=lambda: None))
    monkeypatch.setattr(manager, "get_pp_group", lambda: SimpleNamespace(is_first_rank=True, is_last_rank=True))
    for mode in graphs.MODES[1:]:
        ours = Dispatcher(mode, SIZES, max_num_seqs=8)
        config = SimpleNamespace(
            scheduler_config=SimpleNamespace(max_num_seqs=8),
            compilation_config=ours._dispatcher.compilation_config,
            parallel_config=SimpleNamespace(data_parallel_size=1, tensor_parallel_size=1),
            speculative_config=None,
            num_speculative_tokens=0,
            cache_config=SimpleNamespace(use_kda_recoverssm=False),
        )
        theirs = manager.CudaGraphManager(config, "cpu", CUDAGraphMode[mode], 1)
        theirs._graphs_captured = True
        for batch in range(1, 9):
            want = theirs.dispatch(batch, batch, 1, 0)
            assert ours.dispatch(batch, decode=True) == Dispatch(want.cg_mode.name, want.num_tokens), (mode, batch)


def test_a_fit_wastes_no_more_rows_than_any_other_choice_of_sizes():
    rng = random.Random(3)
    for _ in range(20):
        batches = {n: rng.randint(1, 30) for n in rng.sample(range(1, 40), 7)}
        for most in (1, 2, 3, 5, 7):
            found = graphs.fit(batches, Budget(most))
            others = itertools.combinations(sorted(batches)[:-1], most - 1)
            best = min(graphs.padded_share(batches, [*c, max(batches)]) for c in others)
            assert found.padded == pytest.approx(best), f"{batches}, {most} sizes: {found.sizes}"
            assert len(found.sizes) == most and found.sizes[-1] == max(batches)


def test_a_fit_takes_as_few_sizes_as_the_padding_that_is_allowed():
    batches = dict.fromkeys(range(1, 129), 1)
    few = graphs.fit(batches, Budget(128), most_padded=0.05)
    assert few.padded <= 0.05 < graphs.fit(batches, Budget(len(few.sizes) - 1)).padded


def test_memory_and_seconds_limit_the_number_of_sizes():
    batches = dict.fromkeys(range(1, 129), 1)
    budget = Budget(64, memory_bytes=1e9, bytes_per_graph=2e7, seconds=2.0, seconds_per_graph=0.1)
    assert budget.most_sizes == 10 and len(graphs.fit(batches, budget).sizes) == 10


def test_a_batch_beyond_every_size_runs_unpadded():
    assert graphs.pad(9, [1, 8]) == 9 and graphs.padded_share({9: 1}, [1, 8]) == 0


@pytest.mark.parametrize(
    ("batches", "budget", "named"),
    [
        ({}, Budget(3), "batches"), ({0: 1}, Budget(3), "batches"), ({4: 1}, Budget(0), "budget"),
        ([1, 2], Budget(3), "batches"), ({1.5: 1}, Budget(3), "batches: tokens"), ({"4": 1}, Budget(3), "batches: tok"),
        ({4: 1.5}, Budget(3), "batches: steps"), ({4: float("nan")}, Budget(3), "batches: steps"),
        ({4: 0}, Budget(3), "batches: steps"), ({4: 1}, 3, "budget must be a Budget"),
    ],
)  # fmt: skip
def test_bad_traffic_and_empty_budgets_are_refused_by_name(batches, budget, named):
    with pytest.raises(ValueError, match=named):
        graphs.fit(batches, budget)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"sizes": "3"}, "sizes must"), ({"sizes": 2.5}, "sizes must"), ({"sizes": -1}, "sizes must"),
        ({"graphs_per_size": 0}, "graphs_per_size must"), ({"seconds": -1}, "seconds must"),
        ({"memory_bytes": float("nan"), "bytes_per_graph": 1}, "memory_bytes must"),
        ({"seconds": 1, "seconds_per_graph": -1}, "seconds_per_graph must"),
        ({"memory_bytes": 1e9}, "bytes_per_graph must be given where memory_bytes is a limit"),
    ],
)  # fmt: skip
def test_a_budget_is_made_of_numbers_and_its_limits_limit(options, named):
    with pytest.raises(ValueError, match=f"^{named}"):
        Budget(**{"sizes": 3, **options})


def test_degenerate_traffic_and_endless_budgets_have_a_fit():
    endless = Budget(3, memory_bytes=float("inf"), bytes_per_graph=1)
    assert graphs.fit({7: 1}, endless) == graphs.Fit((7,), 0.0)
    assert graphs.fit({1: 10**12, 1000: 1}, Budget(1)).sizes == (1000,)
    assert graphs.fit({1: 1, 9: 1}, Budget(2), most_padded=1.0).sizes == (9,)
    for share in (-0.1, 1.1, float("nan"), "x"):
        with pytest.raises(ValueError, match="most_padded must"):
            graphs.fit({7: 1}, endless, most_padded=share)  # type: ignore[arg-type]


def test_kept_sizes_are_there_and_the_others_are_the_best_beside_them():
    batches = {n: 1 + (7 * n) % 5 for n in (1, 2, 3, 5, 6, 8, 9)}
    for keep in ((4,), (2, 6), (3, 12)):
        for most in range(len({*keep, 9} if max(keep) < 9 else keep), 7):
            found = graphs.fit(batches, Budget(most), keep=keep)
            assert set(keep) <= set(found.sizes) and len(found.sizes) <= most
            free = itertools.combinations({*batches, *keep}, min(most, len({*batches, *keep})))
            tried = [sorted(sizes) for sizes in free if {*keep} <= {*sizes} and max(sizes) >= 9]
            assert found.padded == min(graphs.padded_share(batches, sizes) for sizes in tried)
    with pytest.raises(ValueError, match="budget: buys 2 sizes, and 3 are needed"):
        graphs.fit(batches, Budget(2), keep=(2, 6))
    with pytest.raises(ValueError, match="keep"):
        graphs.fit(batches, Budget(5), keep=(0,))


@pytest.mark.parametrize(
    ("mode", "sizes", "named"),
    [
        ("BOTH", [1], "mode"), ("FULL", [0], "sizes"), ("FULL", [], "sizes"), ("FULL", [1.5], "each of sizes"),
        ("FULL", ["a"], "each of sizes"), ("FULL", 3, "sizes must be numbers"),
    ],
)  # fmt: skip
def test_bad_modes_and_sizes_are_refused_by_name(mode, sizes, named):
    with pytest.raises(ValueError, match=named):
        Dispatcher(mode, sizes, max_num_seqs=4)


def test_a_trace_gives_the_batches_that_decode_together():
    # The first takes 3 decode steps, the second comes a step later and takes 2.
    trace = [Request(0, 0.0, 8, 4), Request(1, 1.0, 8, 3)]
    assert graphs.decode_batches(trace, 8, steps_per_second=1.0) == Counter({1: 1, 2: 2})
    assert graphs.decode_batches(trace, 1, steps_per_second=1.0) == Counter({1: 5})


def test_a_prompt_joins_those_that_decode():
    # Alone, then beside the first; and with room for one, alone again.
    trace = [Request(0, 0.0, 8, 4), Request(1, 1.0, 9, 3)]
    assert graphs.mixed_batches(trace, 8, steps_per_second=1.0) == Counter({8: 1, 10: 1})
    assert graphs.mixed_batches(trace, 1, steps_per_second=1.0) == Counter({8: 1, 9: 1})


def test_an_arrival_that_rounding_puts_after_its_own_step_is_served():
    # 17 * 0.1 is a little more than 1.7, and times 10 it is 17 all the same.
    trace = [Request(i, 0.1 * i, 8, 2) for i in (0, 17)]
    assert graphs.decode_batches(trace, 8, steps_per_second=10.0) == Counter({1: 2})


@pytest.mark.parametrize(
    ("trace", "most", "rate", "named"),
    [
        ([Request(0, 0.0, 8, 4)], 0, 1.0, "max_num_seqs"), ([Request(0, 0.0, 8, 4)], "1", 1.0, "max_num_seqs"),
        ([Request(0, 0.0, 8, 4)], 1, 0.0, "steps_per_second"), ([Request(0, 0.0, 8, 4)], 1, -1.0, "steps_per_second"),
        ([Request(0, 0.0, 8, 4)], 1, float("nan"), "steps_per_second"),
        ([Request(0, float("nan"), 8, 4)], 1, 1.0, "requests"),
    ],
)  # fmt: skip
def test_a_trace_that_could_not_end_is_refused(trace, most, rate, named):
    with pytest.raises(ValueError, match=named):
        graphs.decode_batches(trace, most, rate)


def test_every_decode_step_of_a_trace_is_counted_once():
    trace = workload.make_requests(
        60, prompt=workload.constant(8), output=workload.geometric(20), arrivals=workload.poisson_arrivals(4.0), seed=1
    )
    seen = graphs.decode_batches(trace, 8, steps_per_second=10.0)
    assert sum(n * steps for n, steps in seen.items()) == sum(r.output_len - 1 for r in trace)
    assert max(seen) <= 8
