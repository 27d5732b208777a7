"""A step that is launched before the tokens of the one before it have come."""

from __future__ import annotations

import pytest

from labkit.engine import EngineError, SamplingParams, Status

PROMPTS = [[1, 2, 3], [4, 5], [6] * 9, [7, 8]]
FREE = SamplingParams(max_tokens=9, ignore_eos=True)


def until_idle(engine):
    emitted = []
    while engine.busy:
        emitted.append([(e.request.id, e.token, e.reason) for e in engine.step()])
    return emitted


@pytest.mark.parametrize("graphs", ["off", "capture"])
@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_tokens_are_those_of_steps_one_after_another(mini, assert_whole, graphs, kernels):
    engine = mini(graphs=graphs, overlap=True, kernels=kernels, max_num_seqs=3)
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    assert engine.generate(PROMPTS, params) == mini().generate(PROMPTS, params)
    assert engine.counters.discarded_tokens == 0
    assert_whole(engine)


def test_a_sampled_token_reaches_the_next_step_on_the_device(mini):
    hot = SamplingParams(max_tokens=9, temperature=1.3, top_p=0.9, seed=5, ignore_eos=True)
    engine = mini(overlap=True, graphs="capture")
    assert engine.generate(PROMPTS, hot) == mini().generate(PROMPTS, hot)


def test_a_token_leaves_one_step_after_it_was_computed_and_none_is_seen_before(mini):
    engine = mini(overlap=True)
    request = engine.add([1, 2, 3], SamplingParams(max_tokens=3, ignore_eos=True))
    assert engine.step() == [] and engine.counters.steps == 1
    assert request.output == [] and request.pending == 1, "the first token is on its way, and the next step may use it"
    assert len(engine.step()) == 1 and engine.counters.steps == 2 and len(request.output) == 1
    assert len(until_idle(engine)) == 2 and engine.counters.steps == 3, "the last step launches nothing"
    assert request.status is Status.FINISHED


def test_a_request_that_ends_with_a_stop_token_has_one_step_too_many_and_its_token_is_dropped(mini, assert_whole):
    free = mini().generate([[1, 2, 3]], FREE)[0]
    stop = SamplingParams(max_tokens=9, stop_token_ids=(free[3],), ignore_eos=True)
    engine = mini(overlap=True)
    outputs = engine.generate([[1, 2, 3], [4, 5]], [stop, FREE])
    assert outputs == [free[: free.index(free[3]) + 1], mini().generate([[4, 5]], FREE)[0]]
    assert engine.counters.discarded_tokens == 1
    assert_whole(engine)


def test_cancelling_a_request_in_flight_drops_its_token_and_keeps_the_others(mini, assert_whole):
    engine = mini(overlap=True)
    gone, stays = engine.add([1, 2, 3], FREE), engine.add([4, 5], FREE)
    engine.step()
    engine.step()
    engine.cancel(gone)
    assert gone.tokens[3:] == gone.output and len(gone.output) == 1
    until_idle(engine)
    assert stays.output == mini().generate([[4, 5]], FREE)[0]
    assert_whole(engine)


def test_a_step_that_fails_leaves_the_tokens_of_the_one_before_to_those_who_live(mini, monkeypatch, assert_whole):
    engine = mini(overlap=True, max_num_seqs=1)
    hit, spared = engine.add([1, 2], FREE), engine.add([3], FREE)
    engine.step()
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner, "launch", lambda _: 1 / 0)
        with pytest.raises(EngineError, match=r"requests \[0\] failed"):
            engine.step()
    assert hit.status is Status.FAILED and hit.output == []
    until_idle(engine)
    assert spared.output == mini().generate([[3]], FREE)[0]
    assert_whole(engine)


def test_a_device_that_fails_behind_the_hosts_back_fails_the_requests_of_its_step(mini, monkeypatch, assert_whole):
    engine = mini(overlap=True)
    request = engine.add([1, 2], FREE)
    engine.step()
    monkeypatch.setattr(engine._flights[0], "tokens", lambda: 1 / 0)
    with pytest.raises(EngineError, match=r"requests \[0\] failed: ZeroDivisionError"):
        engine.step()
    assert request.status is Status.FAILED
    until_idle(engine)
    engine.step()
    assert_whole(engine)
