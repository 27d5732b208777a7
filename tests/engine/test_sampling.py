"""Sampling on the device: the right distribution, and the same tokens whatever happens around a request."""

from __future__ import annotations

import torch

from kernels.sampling import mix, sample, uniform
from labkit.engine import SamplingParams


def draw(logits: torch.Tensor, count: int, temperature: float, top_p: float) -> torch.Tensor:
    rows = logits.expand(count, -1)
    full = torch.full((count,), 1.0)
    return sample(rows, full * temperature, full * top_p, torch.full((count,), 7), torch.arange(count))


def test_frequencies_are_those_of_the_softmax_at_this_temperature():
    logits = torch.tensor([0.0, 1.0, 2.0, -1.0, 0.5])
    count = 20000
    got = torch.bincount(draw(logits, count, 0.7, 1.0), minlength=5) / count
    want = (logits / 0.7).softmax(-1)
    error = (got - want) / (want * (1 - want) / count).sqrt()
    assert error.abs().max() < 4, f"more than 4 standard errors away: {got} instead of {want}"


def test_top_p_keeps_the_smallest_set_that_reaches_it_and_always_one():
    logits = torch.tensor([0.1, 0.5, 0.25, 0.15]).log()
    assert set(draw(logits, 500, 1.0, 0.7).tolist()) == {1, 2}
    assert set(draw(logits, 500, 1.0, 0.5).tolist()) == {1}
    assert set(draw(logits, 500, 1.0, 1e-9).tolist()) == {1}
    assert set(draw(logits, 500, 1.0, 0.95).tolist()) == {0, 1, 2, 3}


def test_a_row_of_temperature_0_is_greedy_beside_rows_that_are_not():
    logits = torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 0.0]])
    args = torch.ones(2), torch.tensor([1, 2]), torch.tensor([3, 4])
    assert sample(logits, torch.tensor([0.0, 0.0]), *args).tolist() == [1, 0]
    assert sample(logits, torch.tensor([0.0, 9.0]), *args).tolist()[0] == 1


def test_the_hash_is_a_bijection_that_stays_within_32_bits_and_its_numbers_within_0_and_1():
    x = torch.arange(2**16) * 65537
    mixed = mix(x)
    assert mixed.unique().numel() == x.numel() and mixed.min() >= 0 and mixed.max() < 2**32
    u = uniform(torch.arange(64), torch.arange(64), 1024)
    assert u.min() > 0 and u.max() < 1 and abs(u.mean() - 0.5) < 0.01
    assert abs(torch.corrcoef(u)[0, 1:]).max() < 0.15, "rows of different seeds must not go together"


def test_a_seed_gives_the_same_tokens_in_any_batch_after_preemption_and_in_a_graph(mini):
    def params(seed: int) -> SamplingParams:
        return SamplingParams(max_tokens=14, temperature=1.0, top_p=0.9, seed=seed, ignore_eos=True)

    prompts = [[1, 2, 3, 4, 5], [6, 7, 8], [9] * 9]
    each = [params(seed) for seed in (1, 2, 2)]
    alone = [mini().generate([p], its)[0] for p, its in zip(prompts, each, strict=True)]
    engine = mini(num_blocks=8, max_num_batched_tokens=4, max_num_seqs=3, graphs="capture")
    assert engine.generate(prompts, each) == alone and engine.counters.preemptions > 0
    assert mini().generate([prompts[0]], params(5))[0] != alone[0], "another seed, other tokens"


def test_one_batch_may_mix_greedy_and_sampled_requests(mini):
    greedy = SamplingParams(max_tokens=6, ignore_eos=True)
    hot = SamplingParams(max_tokens=6, temperature=1.5, seed=3, ignore_eos=True)
    both = mini().generate([[1, 2], [1, 2]], [greedy, hot])
    assert both[0] == mini().generate([[1, 2]], greedy)[0] and both[1] != both[0]
