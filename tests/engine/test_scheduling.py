"""What a step holds, who is served first, and what is counted."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from labkit.engine import FCFS, Priority, SamplingParams, Status

LONG = list(range(1, 41))


def params(tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True)


def test_a_long_prompt_is_computed_in_chunks_beside_the_decodes(mini):
    engine = mini(max_num_batched_tokens=8)
    short = engine.add([1, 2], params(20))
    engine.step()
    engine.add(LONG, params(1))
    steps = []
    while engine.busy and len(steps) < 6:
        chunks = engine.scheduler.schedule()
        steps.append([(c.request.id, c.start, c.length, c.decode) for c in chunks])
        engine._launch(chunks)
        flight = engine._flights.popleft()
        engine._take(flight, flight.tokens())
    assert steps[0] == [(0, 2, 1, True), (1, 0, 7, False)], "the decode goes first, the chunk takes what is left of 8"
    assert [s[1][1:3] for s in steps] == [(0, 7), (7, 7), (14, 7), (21, 7), (28, 7), (35, 5)]
    assert len(short.output) == 7, "a decode advances in every step"


def test_first_come_is_first_served_also_after_a_preemption(mini):
    engine = mini(num_blocks=8, max_num_seqs=4)
    requests = [engine.add([i + 1] * 7, params(12)) for i in range(4)]
    ended = []
    while engine.busy:
        ended += [e.request.id for e in engine.step() if e.reason]
    assert ended == [0, 1, 2, 3] and engine.counters.preemptions > 0
    assert requests[0].preemptions == 0, "the first request is never the victim"


def test_a_lower_priority_number_is_served_first(mini):
    engine = mini(policy=Priority(ageing=None), max_num_seqs=1)
    for priority in (5, 1, 3):
        engine.add([1], params(2), priority=priority)
    ended = []
    while engine.busy:
        ended += [e.request.priority for e in engine.step() if e.reason]
    assert ended == [1, 3, 5]


@pytest.mark.parametrize(("ageing", "starves"), [(None, True), (5, False)])
def test_ageing_ends_starvation_behind_a_stream_of_urgent_requests(mini, ageing, starves):
    engine = mini(policy=Priority(ageing), max_num_seqs=1)
    patient = engine.add([1], params(1), priority=3)
    for _ in range(60):
        engine.add([2], params(1), priority=0)
        engine.step()
    assert (patient.status is Status.WAITING) == starves


def test_a_policy_that_loses_a_request_is_refused_by_name(mini, assert_whole):
    class Forgetful(FCFS):
        def order(self, waiting):
            return super().order(waiting)[:1]

    engine = mini(policy=Forgetful())
    first, second = engine.add([1]), engine.add([2])
    with pytest.raises(ValueError, match=r"policy Forgetful\.order must return .* given \[0, 1\], returned \[0\]"):
        engine.step()
    engine.cancel(first)
    engine.cancel(second)
    assert_whole(engine)


def test_the_watermark_keeps_blocks_free_while_others_run(mini):
    running = {}
    for watermark in (0.0, 0.5):
        engine = mini(num_blocks=16, watermark=watermark, max_num_seqs=8)
        for i in range(8):
            engine.add([i + 1] * 6, params(1))
        running[watermark] = len(engine.scheduler.schedule())
    assert running == {0.0: 8, 0.5: 4}


def test_a_prompt_waits_until_all_of_it_fits_also_beside_one_that_is_half_computed(mini):
    engine = mini(num_blocks=16, max_num_batched_tokens=8, max_num_seqs=4, prefix_caching=False)
    requests = [engine.add([i + 1] * 36, params(1)) for i in range(3)]
    while engine.busy:
        engine.step()
        running = [r for r in requests if r.status is Status.RUNNING]
        needed = sum(-(-len(r) // 4) for r in running)
        assert needed <= 16, "the prompts that run need more blocks than there are: only first chunks were looked at"
    assert engine.counters.preemptions == 0 and all(len(r.output) == 1 for r in requests)


def test_the_prefix_cache_spares_the_shared_blocks_and_says_so(mini):
    engine = mini()
    engine.generate([LONG], params(1))
    again = engine.add([*LONG[:22], 90], params(1))
    engine.step()
    assert again.cached == 20, "five whole blocks of 4 are shared by the 22 equal tokens"
    assert engine.counters.prefix_hits == 20 and engine.counters.prefix_queries == 40 + 23
    assert engine.counters.prefill_tokens == 40 + 3


def test_the_last_token_of_a_prompt_is_computed_even_if_its_block_is_cached(mini):
    engine = mini()
    first = engine.generate([LONG], params(3))[0]
    again = engine.add(LONG, params(3))
    engine.step()
    assert again.cached == 36, "the tenth block holds the last token, whose logits are needed"
    engine.step()
    engine.step()
    assert again.output == first


def test_counters_of_blocks_and_waste_follow_a_request(mini):
    engine = mini(num_blocks=10)
    request = engine.add([1] * 5, params(9))
    engine.step()
    assert (engine.counters.blocks_used, engine.counters.wasted_slots) == (2, 3)
    while engine.busy:
        engine.step()
    assert request.status is Status.FINISHED and request.reason == "length"
    counts = asdict(engine.counters)
    assert counts["blocks_peak"] == 4, "13 of the 14 tokens have K and V: the last one is never computed"
    assert (counts["steps"], counts["prefill_tokens"], counts["decode_tokens"]) == (9, 5, 8)
    assert (counts["blocks_used"], counts["wasted_slots"], counts["finished"]) == (0, 0, 1)
