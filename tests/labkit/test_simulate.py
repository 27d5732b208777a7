"""The toy model tells a wrong scheduler from a right one, and a replay keeps its books."""

import dataclasses
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import simulate
from labkit.simulate import Blocks, Chunk, Job, NoRoom, PagedModel, Server, Stuck, alone, chat_traffic, drive, make_jobs

EVIDENCE = Path(simulate.__file__).parents[1] / "evidence"


def whole(running, waiting, blocks, budget, max_num_seqs):
    """A scheduler for pools that are large enough: everybody, everything that is pending."""
    while waiting and len(running) < max_num_seqs:
        running.append(waiting.pop(0))
        blocks.grow(running[-1], running[-1].max_len)
    return [Chunk(r, r.num_computed, r.pending) for r in running]


def test_requests_served_together_get_the_tokens_of_each_alone():
    jobs, blocks = make_jobs([(3, 5), (9, 2), (1, 7, 2), (4, 1, 3)]), Blocks(40)
    log = drive(whole, jobs, blocks, 100, 3)
    assert [j.output for j in jobs] == [alone(j) for j in jobs]
    assert blocks.num_free == 40 and not any(j.block_table for j in jobs)
    assert sorted(i for step in log for i in step.finished) == [0, 1, 2, 3]


@pytest.mark.parametrize("wrong", ["another's block", "a token left out", "computed at another place"])
def test_every_token_changes_what_comes_after_it(wrong):
    blocks = Blocks(4, 4)
    model, (one, other) = PagedModel(blocks), make_jobs([(8, 3), (8, 3)], 5)
    blocks.grow(one, 8)
    blocks.grow(other, 8)
    if wrong == "another's block":
        model([Chunk(one, 0, 4), Chunk(other, 0, 4)])
        one.block_table[0] = other.block_table[0]
        got = model([Chunk(one, 4, 4)])
    elif wrong == "a token left out":
        model([Chunk(one, 0, 3)])
        got = model([Chunk(one, 4, 4)])
    else:
        model([Chunk(one, 0, 4)])
        one.block_table.reverse()
        got = model([Chunk(one, 4, 4)])
    assert got != alone(one)[:1]


def test_a_token_without_a_block_is_refused_by_request_and_place():
    [job] = make_jobs([(5, 2)])
    blocks = Blocks(9)
    blocks.grow(job, 4)
    with pytest.raises(NoRoom, match="request 0 owns no block for its token 4"):
        PagedModel(blocks)([Chunk(job, 0, 5)])


def test_blocks_are_lent_once_and_come_back_wiped():
    blocks, (one, other) = Blocks(3), make_jobs([(9, 1), (4, 1)])
    assert blocks.grow(one, 9) and not blocks.grow(other, 1) and other.block_table == []
    PagedModel(blocks)([Chunk(one, 0, 9)])
    again = list(one.block_table)
    blocks.release(one)
    assert blocks.num_free == 3 and set(blocks.slots) == {0} and one.num_computed == 0
    one.block_table += again
    with pytest.raises(ValueError, match="is free already"):
        blocks.release(one)
    with pytest.raises(ValueError, match="must be at least 1, got 0 and 4"):
        Blocks(0)


def test_a_scheduler_that_stands_still_is_stopped():
    with pytest.raises(Stuck, match=r"step 0 computes nothing, and requests \[0, 1\] are left"):
        drive(lambda *_: [], make_jobs([(1, 1), (1, 1)]), Blocks(4), 8, 2)

    def again(running, waiting, blocks, *_):
        while waiting:
            running.append(waiting.pop())
            blocks.grow(running[-1], 3)
        return [Chunk(r, 0, 1) for r in running]

    with pytest.raises(Stuck, match=r"after 50 steps requests \[0\] are not done"):
        drive(again, make_jobs([(3, 1)]), Blocks(4), 8, 2, max_steps=50)
    with pytest.raises(TypeError, match="a chunk is"):
        drive(lambda *_: [7], make_jobs([(1, 1)]), Blocks(4), 8, 2)


def recorded_steps_ms(benchmark: str, case: str, unit: str, peer: str) -> dict[int, float]:
    """Batch -> ms of vLLM's decode steps, of the rows whose case is `case` with a number in place of {}."""
    before, after = case.split("{}")
    rows = json.loads((EVIDENCE / f"{benchmark}.nvidia-h200.json").read_text())["rows"]
    return {
        int(row["case"].removeprefix(before).removesuffix(after)): row["peers"][peer]
        for row in rows
        if row["unit"] == unit
        and peer in row["peers"]
        and row["case"].startswith(before)
        and row["case"].endswith(after)
    }


@pytest.mark.parametrize(
    "benchmark, case, unit, peer, batches, error",
    [
        ("engine", "decode step: 8B, batch {}, 128 + 128 tokens", "ms", "vllm_graph", 4, 0.03),  # fitted to these
        ("engine", "decode step: 8B, batch {}, 128 + 128 tokens", "ms", "vllm_eager", 4, 0.03),
        ("vllm", "Qwen3-8B: batch {}", "ms a step", "vllm_graph", 15, 0.06),  # and not to these
    ],
)
def test_the_cost_model_gives_the_recorded_decode_steps(benchmark, case, unit, peer, batches, error):
    measured = recorded_steps_ms(benchmark, case, unit, peer)
    assert len(measured) >= batches, f"only batches {sorted(measured)} are recorded"
    for batch, milliseconds in measured.items():
        context = batch * 192  # prompt 128, and half of the 128 that are generated
        got = 1e3 * simulate.QWEN3_8B_ON_H200.seconds(batch, batch, context, peer == "vllm_graph")
        assert got == pytest.approx(milliseconds, rel=error), f"batch {batch}: {got:.2f} ms, {milliseconds} recorded"


def test_a_step_takes_as_long_as_the_slower_of_host_and_device():
    cost = simulate.StepCost(1e9, 0, 1e6, 1e12, 1e12, eager=5e-3, graph=0, host_row=1e-4, rest=0, row=0)
    assert cost.seconds(1, 1, 0, graph=True) == pytest.approx(1e-3), "the weights"
    assert cost.seconds(1, 1, 0, graph=False) == pytest.approx(5.1e-3), "the launches, and one request"
    assert cost.seconds(9000, 1, 0, graph=False) == pytest.approx(9e-3), "the products, beside the launches"


SERVERS = {
    "ample": Server(),
    "small pool": Server(num_blocks=300, max_num_seqs=16, budget=256),
    "headroom": Server(num_blocks=300, max_num_seqs=16, budget=256, headroom=0.2),
    "batch by batch": Server(one_batch=True, max_num_seqs=16, num_blocks=900),
}
POLICIES = {
    "fcfs": simulate.fcfs,
    "oracle": simulate.shortest(simulate.known),
    "similar": simulate.similar(simulate.known),
    "priority": simulate.prioritised(5),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("server", SERVERS)
def test_a_replay_serves_everybody_once_and_every_token_has_its_step(server, policy):
    trace = chat_traffic(120, 12, seed=4, burst=3)
    result = simulate.replay(trace, SERVERS[server], POLICIES[policy], record=True)
    assert [s.ticket.id for s in result.served] == list(range(120))
    decodes = {t.id: 0 for t in trace}
    for step in result.steps:
        rows = len(step.prefill) + len(step.decode)
        assert 0 < rows <= SERVERS[server].max_num_seqs and len(set(step.prefill + step.decode)) == rows
        assert step.graph == (not step.prefill), "a step with a prompt in it runs eagerly, all others by graph"
        for number in step.decode:
            decodes[number] += 1
    for s in result.served:
        assert s.ticket.arrival <= s.started < s.first_token <= s.finished
        # Each admission computes a prompt, whose last chunk gives one token; all others come one a step.
        assert decodes[s.ticket.id] <= s.ticket.output_len - 1
        assert decodes[s.ticket.id] >= s.ticket.output_len - 1 - s.preemptions
    assert result.preemptions == sum(s.preemptions for s in result.served)
    assert (result.recomputed > 0) == (result.preemptions > 0)


def test_a_pool_that_is_too_small_preempts_and_headroom_spares_it():
    trace = chat_traffic(150, 14, seed=1)
    small, spared = (simulate.replay(trace, SERVERS[name]) for name in ("small pool", "headroom"))
    assert small.preemptions > 20 > spared.preemptions
    assert simulate.replay(trace, SERVERS["ample"]).preemptions == 0


def test_the_pictures_requests_show_what_shortest_first_gains_and_who_pays():
    policies = {"fcfs": simulate.fcfs, "aged": simulate.prioritised(0.05), "shortest": POLICIES["oracle"]}
    runs = {name: simulate.replay(simulate.DEMO, simulate.DEMO_SERVER, policy) for name, policy in policies.items()}
    assert runs["shortest"].mean < runs["aged"].mean < 0.9 * runs["fcfs"].mean
    assert runs["fcfs"].longest_wait < runs["aged"].longest_wait < runs["shortest"].longest_wait


def run_books(trace, server):
    """A replay with its books looked at after every step: blocks, KV tokens."""
    from labkit.simulate.replay import _Run

    run = _Run(trace, server, simulate.fcfs, False)
    while run.coming or run.waiting or run.running:
        run._arrive()
        if not (run.waiting or run.running):
            run.now = run.coming[-1].arrival
            continue
        run._one_step()
        assert run.free + sum(live.blocks for live in run.running) == server.num_blocks and run.free >= 0
        held = 0
        for live in run.running:
            grown = 0 if live.decodes_since is None else run.step - 1 - live.decodes_since
            held += live.computed + grown
            assert live.computed + grown <= live.blocks * server.block_size
        assert run.context == held
    return run


@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 1000),
    blocks=st.integers(170, 400),
    seqs=st.integers(1, 20),
    headroom=st.sampled_from([0, 0.1]),
    size=st.sampled_from([16, 32, 64]),
)
def test_blocks_and_tokens_add_up_after_every_step_of_any_replay(seed, blocks, seqs, headroom, size):
    server = Server(
        num_blocks=max(blocks, 3000 // size + 90), max_num_seqs=seqs, budget=128, headroom=headroom, block_size=size
    )
    trace = [dataclasses.replace(t, prompt_len=min(t.prompt_len, 2500)) for t in chat_traffic(25, 20, seed)]
    run = run_books(trace, server)
    assert run.free == server.num_blocks and run.context == 0 and len(run.result.served) == 25


def test_a_replay_follows_from_its_trace_and_nothing_else():
    trace = chat_traffic(60, 9, seed=2)
    assert simulate.replay(trace, Server()).served == simulate.replay(trace, Server()).served
    assert chat_traffic(60, 9, seed=2) == trace != chat_traffic(60, 9, seed=3)
    lengths = [(t.prompt_len, t.output_len) for t in trace]
    assert lengths == [(t.prompt_len, t.output_len) for t in chat_traffic(60, 30, seed=2)], "a rate changed lengths"


def test_prediction_is_asked_for_once_a_ticket():
    asked = []

    def predict(tickets):
        asked.extend(t.id for t in tickets)
        return simulate.known(tickets)

    simulate.replay(chat_traffic(80, 30, seed=2), Server(max_num_seqs=8), simulate.shortest(predict))
    assert len(asked) == len(set(asked)) == 80


def test_a_policy_serves_another_trace_as_if_it_were_new():
    used, (one, other) = simulate.shortest(simulate.known), (chat_traffic(60, 30, seed=s) for s in (2, 3))
    simulate.replay(one, Server(max_num_seqs=4), used)
    fresh = simulate.replay(other, Server(max_num_seqs=4), simulate.shortest(simulate.known))
    assert simulate.replay(other, Server(max_num_seqs=4), used).served == fresh.served


def test_bad_servers_requests_and_policies_are_named():
    trace = chat_traffic(5, 5)
    with pytest.raises(ValueError, match=r"budget \(8\) must be at least max_num_seqs \(64\)"):
        Server(budget=8)
    with pytest.raises(ValueError, match=r"headroom must be in 0 \.\. 1, and is 1\.5"):
        Server(headroom=1.5)
    with pytest.raises(ValueError, match="must be at least 1"):
        Server(num_blocks=0)
    with pytest.raises(ValueError, match=r"request \d needs \d+ blocks, the pool has 2"):
        simulate.replay(trace, Server(num_blocks=2))
    with pytest.raises(ValueError, match="the policy must return the tickets that it was given"):
        simulate.replay(trace, Server(), lambda waiting, now: waiting[:0])


def test_a_job_knows_what_is_pending_and_when_it_is_done():
    job = Job(3, [5, 6, 7], num_computed=2, prompt_len=2, max_tokens=3, stop=9)
    assert (job.pending, job.output, job.max_len, job.done) == (1, [7], 5, False)
    job.tokens += [9]
    assert job.done and repr(job) == "Job 3 (2 of 4 tokens computed)"


def test_a_scheduler_runs_in_the_real_engine_and_what_it_does_is_told():
    def schedule(running, waiting, blocks, budget, max_num_seqs):
        """One request at a time, one token a step once it decodes."""
        if not running and blocks.grow(waiting[0], len(waiting[0])):
            running.append(waiting.pop(0))
        [request] = running
        length = min(request.pending, budget)
        assert blocks.grow(request, request.num_computed + length)
        return [Chunk(request, request.num_computed, length)]

    run = simulate.run_in_engine(schedule)
    assert run.same_tokens and run.preemptions == 0 and run.free == run.num_blocks == 12
    assert str(run).startswith(f"{run.steps} steps, 0 preemptions, the same tokens as each prompt alone, 12 of 12")


def test_prompts_beside_decodes_are_measured_in_tokens_and_steps():
    def plan(running, waiting, budget, max_num_seqs):
        """Whole prompts: what a server without chunks does."""
        running += waiting
        waiting.clear()
        return [Chunk(r, r.num_computed, r.pending) for r in running]

    assert simulate.beside_prompts(plan, 4096) == (203, 45)


def test_rank_correlation_sees_order_and_nothing_else():
    assert simulate.rank_correlation([1, 2, 3, 4], [1, 10, 100, 1000]) == pytest.approx(1)
    assert simulate.rank_correlation([1, 2, 3, 4], [9, 7, 5, 3]) == pytest.approx(-1)
