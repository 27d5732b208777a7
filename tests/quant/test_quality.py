"""What quantization cost: numbers equal to torch's, no difference where there is none, and losses that are found."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from labkit.models import load_arithmetic, make_sums, plant_outliers
from labkit.models.sums import PROMPT_LENGTH
from labkit.quant import PER_CHANNEL, Scheme, clamp_sigmas, round_trip
from labkit.quant.quality import (
    Quality,
    compare_quality,
    compare_right,
    exact_match,
    measure_quality,
    reference_of,
    share_right,
)
from labkit.texts import EVALUATION, token_windows

SUMS = make_sums(150, 10**9)
WINDOWS = SUMS.tokens[:, :-1]
SKIP = PROMPT_LENGTH - 1  # what is judged is the answer: the exercise itself cannot be foreseen


@pytest.fixture(scope="module")
def model():
    """Not to be changed: take a deep copy."""
    return load_arithmetic()


@pytest.fixture(scope="module")
def reference(model):
    return reference_of(model, WINDOWS, skip=SKIP)


@torch.no_grad()
def quantized(model, scheme, sigmas=None):
    made = copy.deepcopy(model)
    for name, linear in made.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            weight = linear.weight if sigmas is None else clamp_sigmas(linear.weight, sigmas, scheme)
            linear.weight.copy_(round_trip(weight.float(), scheme))
    return made


def test_a_model_does_not_differ_from_itself(model, reference):
    first, second = (measure_quality(model, reference, batch_size=size) for size in (150, 64))
    assert first.kl.abs().max() < 1e-5 and bool(first.agrees.all())
    same = measure_quality(model, reference)
    assert torch.equal(same.kl, torch.zeros_like(same.kl)), "the same batches give the same bits"
    compared = compare_quality(same, copy.deepcopy(same))
    assert compared.found == () and (compared.perplexity.value, compared.kl.value, compared.top1.value) == (1, 0, 0)
    assert abs(compare_quality(first, second).perplexity.value - 1) < 1e-5


def test_the_three_numbers_are_those_that_torch_computes(model, reference):
    other = quantized(plant_outliers(copy.deepcopy(model), "weight"), Scheme(group_size=64))
    quality = measure_quality(other, reference)
    with torch.no_grad():
        theirs, mine = model(WINDOWS).logits[:, SKIP:-1], other(WINDOWS).logits[:, SKIP:-1]
    nll = F.cross_entropy(mine.flatten(0, 1), WINDOWS[:, SKIP + 1 :].flatten())
    kl = F.kl_div(
        mine.log_softmax(-1).flatten(0, 1), theirs.log_softmax(-1).flatten(0, 1), None, None, "batchmean", True
    )
    top1 = (theirs.argmax(-1) == mine.argmax(-1)).float().mean()
    assert quality.nll.shape == (150, 12 - 1 - SKIP)
    assert quality.perplexity.value == pytest.approx(nll.exp().item(), rel=1e-5)
    assert quality.kl_divergence.value == pytest.approx(kl.item(), rel=1e-4)
    assert quality.top1.value == pytest.approx(top1.item(), rel=1e-6)
    for estimate in (quality.perplexity, quality.kl_divergence, quality.top1):
        assert estimate.low <= estimate.value <= estimate.high and estimate.low < estimate.high
    assert str(quality).startswith(f"perplexity {quality.perplexity.value:.4g} [")


def test_a_planted_loss_is_found_and_a_harmless_change_is_not_called_one(model, reference):
    def changed(share):
        made = copy.deepcopy(model)
        weight = made.model.layers[1].mlp.down_proj.weight
        noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            weight += share * weight.std() * noise
        return made

    whole = measure_quality(model, reference)
    ruined = quantized(plant_outliers(copy.deepcopy(model), "weight"), Scheme(group_size=PER_CHANNEL))
    ruined, worse, harmless = (measure_quality(m, reference) for m in (ruined, changed(1.0), changed(1e-6)))
    found = compare_quality(whole, ruined)
    assert set(found.found) == {"perplexity", "kl", "top1"}, found
    assert found.perplexity.low > 2 and found.kl.low > 1 and found.top1.high < -0.2
    assert compare_quality(ruined, whole).perplexity.high < 0.5, "the other way round it is a gain"
    found = compare_quality(whole, worse)
    assert "kl" in found.found and found.top1.value == 0, f"KL sees what no answer shows yet: {found}"
    assert compare_quality(whole, harmless).kl.value < found.kl.low / 100


def synthetic(seed: int, shift: float, *, windows: int = 8, tokens: int = 511) -> tuple[Quality, Quality]:
    """Two models on text whose difficulty varies much more than they differ; neighbours differ alike, 16 by 16."""
    generator = torch.Generator().manual_seed(seed)
    hard = torch.randn(windows, tokens, generator=generator).mul(1.5).exp()
    apart = torch.randn(windows, tokens // 16 + 1, generator=generator).repeat_interleave(16, 1)[:, :tokens]
    other = hard + shift + 0.2 * apart
    agrees = torch.ones_like(hard, dtype=torch.bool)
    return Quality(hard, torch.zeros_like(hard), agrees), Quality(other, torch.zeros_like(hard), agrees)


def test_pairs_show_a_loss_of_five_percent_that_two_intervals_cannot_tell():
    first, second = synthetic(0, shift=0.05)
    assert first.perplexity.high > second.perplexity.low, "the intervals overlap"
    compared = compare_quality(first, second).perplexity
    assert compared.low > 1 and compared.holds(math.exp(0.05)), compared


def test_models_that_differ_by_chance_alone_are_told_apart_one_time_in_twenty():
    false_alarms = sum("perplexity" in compare_quality(*synthetic(seed, shift=0.0)).found for seed in range(100))
    assert 1 <= false_alarms <= 13, f"{false_alarms} of 100; were neighbours drawn one by one, it would be about 60"


def test_one_block_says_nothing_about_its_own_precision(model):
    few = reference_of(model, WINDOWS[:1], skip=SKIP)
    quality = measure_quality(model, few)
    assert quality.top1.value == 1 and (quality.top1.low, quality.top1.high) == (-math.inf, math.inf)
    assert quality.perplexity.low == 0 and compare_quality(quality, quality).found == ()


def test_shares_have_the_interval_of_wilson():
    def interval(right, count):
        estimate = share_right(torch.arange(count) < right)
        return pytest.approx((estimate.value, estimate.low, estimate.high), abs=1e-4)

    assert interval(50, 100) == (0.5, 0.4038, 0.5962)
    assert interval(0, 10) == (0, 0, 0.2775)
    assert interval(10, 10) == (1, 0.7225, 1)
    with pytest.raises(ValueError, match="right must hold at least one exercise"):
        share_right(torch.zeros(0))


def test_exact_match_of_two_models_is_compared_exercise_by_exercise(model):
    first = exact_match(model, SUMS)
    worse = first.clone()
    worse[:5] = False
    assert share_right(first).low < share_right(worse).high, "the intervals overlap"
    assert compare_right(first, worse).high < 0 and compare_right(first, first.clone()).holds(0)
    assert compare_right(first, worse).value == pytest.approx(-5 / 150, abs=1e-6)
    with pytest.raises(ValueError, match=r"both must be \[count\] of the same exercises"):
        compare_right(first, worse[:7])


def test_a_copy_runs_in_another_dtype_and_the_model_stays_as_it_is(model):
    mine = copy.deepcopy(model).train()
    reference = reference_of(mine, WINDOWS[:20], dtype=torch.bfloat16)
    assert reference.logits.dtype == torch.bfloat16 and mine.dtype == torch.float32 and mine.training
    quality = measure_quality(mine, reference, dtype=torch.bfloat16)
    assert torch.equal(quality.kl, torch.zeros_like(quality.kl))
    assert measure_quality(mine, reference).kl.max() > 0, "fp32 is another model than its bf16 copy"


def test_what_does_not_fit_is_refused_by_name(model, reference):
    with pytest.raises(ValueError, match=r"windows must be int64 \[count, length\], and is torch.float32 \[2, 3\]"):
        reference_of(model, torch.zeros(2, 3))
    with pytest.raises(ValueError, match="skip must be from 0 to 10 for windows of 12, not 11"):
        reference_of(model, WINDOWS, skip=11)
    other = copy.deepcopy(model)
    other.resize_token_embeddings(32)
    with pytest.raises(ValueError, match="model has a vocabulary of 32, the reference of 64"):
        measure_quality(other, reference)
    quality = measure_quality(model, reference)
    with pytest.raises(ValueError, match="both must be of the same windows"):
        compare_quality(quality, Quality(quality.nll[:5], quality.kl[:5], quality.agrees[:5]))


@pytest.mark.smollm2
def test_on_smollm2_groups_help_and_the_three_sigma_clamp_destroys(smollm2):
    model, tokenizer = smollm2
    windows = torch.cat([token_windows(tokenizer, name, count=1, length=128) for name in EVALUATION])
    reference = reference_of(model, windows)
    whole = measure_quality(model, reference)
    assert whole.perplexity.value < 120, "SmolLM2 reads English: of 49,152 tokens it weighs some dozens"
    rows, groups = Scheme(group_size=PER_CHANNEL), Scheme(group_size=64)
    by_row, by_group, clamped = (
        measure_quality(quantized(model, scheme, sigmas), reference)
        for scheme, sigmas in ((rows, None), (groups, None), (rows, 3))
    )
    gain, loss = compare_quality(by_row, by_group), compare_quality(by_row, clamped)
    assert gain.kl.high < 0 and gain.top1.value > 0, f"groups of 64 must be nearer to the model: {gain}"
    assert loss.kl.low > 0.5 and loss.perplexity.low > 2, f"outliers of real weights are the salient ones: {loss}"
