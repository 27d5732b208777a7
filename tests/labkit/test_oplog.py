"""What a step asks of torch, and what a first launch costs."""

import sys

import pytest
import torch

from labkit import first_launch, oplog
from labkit.graph_simulator import launches


def test_a_view_is_told_by_the_memory_of_its_argument_and_a_write_by_its_schema():
    x = torch.ones(4, 4)
    ops = oplog.record_ops(lambda: (x.t(), x.contiguous(), x.t().contiguous(), x.add_(1), x.squeeze_()))
    found = {op.name: (bool(set(op.reads) & set(op.gives)), op.in_place) for op in ops}
    assert found == {"t": (True, False), "clone": (False, False), "add_": (True, True), "squeeze_": (True, False)}


def test_launches_of_a_decode_step_grow_with_its_layers_and_not_with_its_batch():
    counts = {}
    for layers, batch in ((1, 2), (2, 2), (3, 2), (3, 7)):
        step = oplog.decode_step(layers, batch)
        with launches() as log:
            made = step()
        assert len(made) == batch, "a token for each request"
        counts[layers, batch] = log.count
    assert counts[3, 2] - counts[2, 2] == counts[2, 2] - counts[1, 2] > 50
    assert counts[3, 7] == counts[3, 2]


def test_the_parts_of_a_first_launch_add_up_to_it_and_the_second_takes_next_to_nothing():
    found = first_launch.measure()
    imports, *others = found.parts.values()
    assert imports > 0 and sum(others) == pytest.approx(found.first)
    assert set(first_launch.STAGES.values()) < set(found.parts), "a stage of the compiler is not accounted for"
    assert found.second < found.first / 20


def test_a_failing_process_says_its_last_words(monkeypatch, tmp_path):
    broken = tmp_path / "python"
    broken.write_text("#!/bin/sh\necho 'no compiler here' >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(broken))
    with pytest.raises(RuntimeError, match="no compiler here"):
        first_launch.measure()
