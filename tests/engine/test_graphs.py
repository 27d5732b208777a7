"""Capture and replay under the simulator, which keeps both laws of a CUDA graph: fixed shapes, fixed addresses."""

from __future__ import annotations

import pytest
import torch

from labkit.engine import CaptureError, SamplingParams, default_sizes
from labkit.engine.graphs import GraphLadder, launches, simulated_capture

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def test_a_replay_reads_the_buffer_it_was_captured_with_and_no_other():
    x = torch.ones(3)
    graph = simulated_capture(lambda: ((x * 2).cumsum(0),))
    x.copy_(torch.tensor([1.0, 5.0, 0.0]))
    graph.replay()
    assert graph.outputs[0].tolist() == [2.0, 12.0, 12.0]
    x = torch.zeros(3)  # a new buffer under the old name: the graph never hears of it
    graph.replay()
    assert graph.outputs[0].tolist() == [2.0, 12.0, 12.0]


def test_a_replay_repeats_writes_in_place():
    total, x = torch.zeros(2), torch.ones(2)
    graph = simulated_capture(lambda: (total.add_(x),))
    before = total.clone()
    graph.replay()
    assert (total - before).tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "work", [lambda x: x.sum().item(), lambda x: x[x > 0], lambda x: x.nonzero()], ids=["item", "mask", "nonzero"]
)
def test_a_host_read_inside_a_capture_is_refused(work):
    x = torch.ones(3)

    def step():
        work(x)
        return (x + 1,)

    with pytest.raises(CaptureError, match="inside a capture: a graph cannot wait for the host"):
        simulated_capture(step)


def test_views_are_not_launches():
    x = torch.ones(4, 4)
    with launches() as log:
        x.t()[1:].reshape(-1)[:4].view(2, 2).mul_(2).sum()
    assert log.count == 3, "a copy in reshape, mul_ and sum"


def test_a_view_in_place_is_no_launch_and_replays_keep_the_shapes_of_the_capture():
    """A vector times a matrix is an mm whose result is then squeezed in place."""
    x, w = torch.ones(3), torch.eye(3)
    with launches() as log:
        x @ w
    assert log.count == 1
    graph = simulated_capture(lambda: (x @ w,))
    x.copy_(torch.tensor([1.0, 5.0, 0.0]))
    graph.replay()
    graph.replay()
    assert graph.outputs[0].tolist() == [1.0, 5.0, 0.0]


@pytest.mark.parametrize("largest", [1, 3, 12, 20, 100, 256, 300])
def test_the_ladder_ends_with_the_largest_batch_itself(largest):
    sizes = default_sizes(largest)
    assert sizes[-1] == largest and list(sizes) == sorted(set(sizes))
    ladder = GraphLadder(sizes, lambda size: lambda: (torch.zeros(size),), None)
    for batch in range(1, largest + 1):
        assert ladder.size_for(batch) >= batch
    assert ladder.size_for(largest + 1) is None


def test_the_largest_size_is_captured_first():
    order = []

    def capture(step):
        order.append(len(step()[0]))
        return simulated_capture(step)

    GraphLadder((4, 1, 8), lambda size: lambda: (torch.zeros(size) + 1,), capture)
    assert order == [8, 4, 1]


def test_graphs_and_eager_steps_give_the_same_tokens_at_the_same_padded_batch(mini):
    prompts = [[1, 2, 3], [4, 5], [6], [7, 8, 9, 10, 11]]
    made = {}
    for graphs in ("capture", "padded"):
        engine = mini(graphs=graphs, max_num_seqs=5, capture_sizes=(1, 5))
        made[graphs] = engine.generate(prompts, PARAMS)
        assert engine.counters.padded_rows == 7, "seven decode steps of four rows at size 5"
        replays = 7 if graphs == "capture" else 0
        assert (engine.counters.replays, engine.counters.graph_steps) == (replays, replays)
        assert engine.counters.steps == engine.counters.graph_steps + engine.counters.eager_steps
    assert made["capture"] == made["padded"] == mini().generate(prompts, PARAMS)


def test_a_decode_step_is_one_launch_with_a_graph_and_more_than_a_hundred_without(mini):
    counts = {}
    for graphs in ("capture", "padded"):
        engine = mini(graphs=graphs, count_launches=True)
        engine.add([1, 2, 3], PARAMS)
        engine.step()
        before = engine.counters.launches
        engine.step()
        counts[graphs] = engine.counters.launches - before
    assert counts["capture"] == 1 and counts["padded"] > 100


def test_a_batch_beyond_the_largest_size_runs_without_a_graph(mini):
    engine = mini(graphs="capture", max_num_seqs=4, capture_sizes=(2,))
    prompts = [[1], [2], [3]]
    assert engine.generate(prompts, PARAMS) == mini().generate(prompts, PARAMS)
    assert engine.counters.replays == 0 and engine.counters.captures == 1


def test_the_captured_block_table_holds_a_request_of_the_whole_length(mini):
    """One column too few and the last block of a request of max_model_len tokens has no place."""
    for block_size, length in ((4, 64), (7, 64), (16, 33)):
        options = {"block_size": block_size, "max_model_len": length}
        prompt = [1 + i % 90 for i in range(length - 3)]
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        assert mini(graphs="capture", **options).generate([prompt], params) == mini(**options).generate(
            [prompt], params
        )


def test_rows_of_finished_requests_are_padding_that_writes_nowhere(mini):
    engine = mini(graphs="capture", max_num_seqs=2, capture_sizes=(2,), prefix_caching=False)
    engine.generate([[1, 2, 3], [4, 5, 6]], PARAMS)
    cache = engine.runner.cache[:, :, :-1].clone()
    request = engine.add([7], SamplingParams(max_tokens=3, ignore_eos=True))
    engine.step()
    engine.step()
    changed = (engine.runner.cache[:, :, :-1] != cache).flatten(3).any(-1).any(0).any(0)
    assert changed.nonzero().flatten().tolist() == request.block_table
