"""The trace behind the pool widget: what is drawn is what happened."""

import pytest

from labkit.block_pool import BlockPool
from labkit.pooltrace import DEMO, Arrival, play


@pytest.fixture(scope="module")
def trace():
    return play(BlockPool(24, 4), 24, 4)


def test_the_demonstration_shows_sharing_waste_and_preemption(trace):
    assert any(s.shared for s in trace.steps), "no step shows a shared block"
    assert any(s.wasted for s in trace.steps), "no step shows waste"
    assert trace.preemptions, "no request is preempted"
    assert "preempted" in trace.steps[trace.first_preemption + 1].event


def test_all_blocks_are_free_when_all_requests_are_done(trace):
    assert trace.steps[-1].free == 24
    assert trace.steps[-1].running == trace.steps[-1].waiting == ()


def test_blocks_are_counted_once_each(trace):
    for s in trace.steps:
        owned = [o for o in s.owners if o]
        assert s.free + len(owned) == 24
        assert all(0 < f <= 4 for o, f in zip(s.owners, s.filled, strict=True) if o), (
            f"step {s.step}: an owned block is empty"
        )
        assert {i for o in owned for i in o} == set(s.running), f"step {s.step}: a block belongs to nobody who runs"


def test_every_request_gets_its_tokens():
    final = {}
    for s in play(BlockPool(24, 4), 24, 4).steps:
        for i in s.running:
            final[i] = s.step
    assert sorted(final) == list(range(len(DEMO)))


def test_a_request_that_can_never_fit_is_named():
    with pytest.raises(RuntimeError, match=r"requests \[0\] are not done after 50 steps"):
        play(BlockPool(2, 4), 2, 4, [Arrival(0, tuple(range(9)), 1)], max_steps=50)
