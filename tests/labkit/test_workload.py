"""Length laws keep their mean, arrivals their rate, and a trace follows from its seed."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labkit import workload
from labkit.workload import make_requests

MEANS = st.floats(min_value=10, max_value=2000)
SEEDS = st.integers(min_value=0, max_value=2**32)
COUNT = 4000


def drawn(law, seed: int, count: int = COUNT) -> np.ndarray:
    return law(np.random.default_rng(seed), count)


@settings(max_examples=25, deadline=None)
@given(mean=MEANS, seed=SEEDS)
@pytest.mark.parametrize("name", ["poisson", "geometric", "lognormal"])
def test_a_law_keeps_its_mean_and_gives_whole_positive_lengths(name, mean, seed):
    lengths = drawn(getattr(workload, name)(mean), seed)
    assert np.issubdtype(lengths.dtype, np.integer)
    assert lengths.min() >= 1
    error = abs(lengths.mean() - mean)
    allowed = 0.02 * mean + 6 * lengths.std() / COUNT**0.5
    assert error < allowed, f"{name}({mean}): the mean of {COUNT} lengths is {lengths.mean():.1f}"


def test_the_laws_have_the_spread_that_names_them():
    assert drawn(workload.constant(500), 0).std() == 0
    assert drawn(workload.poisson(500), 0).std() == pytest.approx(499**0.5, rel=0.05)
    assert drawn(workload.geometric(500), 0).std() == pytest.approx(500, rel=0.08)
    assert np.log(drawn(workload.lognormal(5000, 0.6), 0)).std() == pytest.approx(0.6, rel=0.05)


def test_the_mix_is_30_50_20():
    lengths = drawn(workload.short_medium_long(64, 512, 4096), 0)
    shares = [np.mean(lengths <= 96), np.mean((lengths > 96) & (lengths <= 768)), np.mean(lengths > 768)]
    assert shares == pytest.approx([0.3, 0.5, 0.2], abs=0.03)


@settings(max_examples=25, deadline=None)
@given(rate=st.floats(min_value=0.1, max_value=1000), burst=st.integers(min_value=1, max_value=16), seed=SEEDS)
def test_arrivals_keep_their_rate_in_order(rate, burst, seed):
    for process in (workload.poisson_arrivals(rate), workload.bursty_arrivals(rate, burst)):
        times = drawn(process, seed)
        assert (np.diff(times) >= 0).all()
        assert COUNT / times[-1] == pytest.approx(rate, rel=6 * (burst / COUNT) ** 0.5 + 0.02)


def test_a_burst_comes_at_one_instant():
    times = drawn(workload.bursty_arrivals(10, 8), 0, 20)
    assert len(set(times)) == 3
    assert (times[:8] == times[0]).all()


def test_a_trace_follows_from_its_seed_and_only_from_it():
    def trace(seed, **laws):
        defaults = {"prompt": workload.geometric(20), "output": workload.geometric(500)}
        return make_requests(50, **(defaults | laws), arrivals=workload.poisson_arrivals(4), seed=seed)

    assert trace(1) == trace(1) != trace(2)
    other = trace(1, prompt=workload.constant(20))
    assert [r.output_len for r in other] == [r.output_len for r in trace(1)], "another prompt law changed the answers"
    assert [r.id for r in other] == list(range(50))


def test_all_requests_come_at_once_unless_told_otherwise():
    assert {r.arrival for r in make_requests(5, prompt=workload.constant(1), output=workload.constant(1))} == {0.0}
    assert make_requests(0, prompt=workload.poisson(3), output=workload.poisson(3)) == []


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: workload.constant(0), "tokens must be at least 1, and is 0"),
        (lambda: workload.poisson(0.5), "mean must be at least 1"),
        (lambda: workload.geometric(float("nan")), "mean must be at least 1, and is nan"),
        (lambda: workload.lognormal(20, 0), "sigma must be more than 0"),
        (lambda: workload.short_medium_long(long=1), "long must be at least 2"),
        (lambda: workload.poisson_arrivals(0), "rate must be more than 0"),
        (lambda: workload.bursty_arrivals(1, 0), "burst must be at least 1"),
        (
            lambda: make_requests(-1, prompt=workload.constant(1), output=workload.constant(1)),
            "count must be at least 0",
        ),
        (lambda: make_requests(3, prompt=lambda r, n: [0, 1, 2], output=workload.constant(1)), "prompt: a length law"),
    ],
)
def test_a_bad_parameter_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
