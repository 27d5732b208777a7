"""Request traces: how long prompts and answers are, and when requests come.

A length law is a function of a random generator and a count that gives that many whole numbers of tokens, each at least
1. All laws are named by their mean, so that two laws of equal mean can be exchanged. An arrival process gives times in
seconds. Everything follows from one seed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

Law = Callable[[np.random.Generator, int], np.ndarray]
Arrivals = Callable[[np.random.Generator, int], np.ndarray]


@dataclass(frozen=True)
class Request:
    """A request of a trace. arrival: seconds. prompt_len, output_len: tokens, each at least 1."""

    id: int
    arrival: float
    prompt_len: int
    output_len: int


def constant(tokens: int) -> Law:
    """Always this many tokens."""
    _at_least("tokens", tokens, 1)
    return lambda random, count: np.full(count, int(tokens))


def poisson(mean: float) -> Law:
    """1 + Poisson(mean - 1): a narrow bell, standard deviation about sqrt(mean)."""
    _at_least("mean", mean, 1)
    return lambda random, count: 1 + random.poisson(mean - 1, count)


def geometric(mean: float) -> Law:
    """The law of an answer that ends with the same chance at each token: many short ones, a long tail."""
    _at_least("mean", mean, 1)
    return lambda random, count: random.geometric(1 / mean, count)


def lognormal(mean: float, sigma: float = 0.8) -> Law:
    """exp(Normal), rounded up to whole tokens, with about this mean: what real prompts and answers look like.

    sigma: standard deviation of the logarithm; 0.6 to 1.0 for chat traffic. The fraction of a token that rounding adds
    is taken off beforehand, so the mean holds to about 1 % from 10 tokens on.
    """
    _at_least("mean", mean, 1)
    _more_than("sigma", sigma, 0)
    mu = math.log(max(mean - 0.5, 0.5)) - sigma**2 / 2
    return lambda random, count: np.maximum(1, np.ceil(random.lognormal(mu, sigma, count))).astype(int)


def short_medium_long(short: int = 64, medium: int = 512, long: int = 4096) -> Law:
    """The 30/50/20 mix: 30 % short, 50 % medium, 20 % long, each uniform within half of its length up or down."""
    for name, value in (("short", short), ("medium", medium), ("long", long)):
        _at_least(name, value, 2)

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        centre = random.choice([short, medium, long], count, p=[0.3, 0.5, 0.2])
        return np.maximum(1, np.rint(centre * random.uniform(0.5, 1.5, count))).astype(int)

    return draw


def at_once() -> Arrivals:
    """All requests at time 0, as in an offline batch."""
    return lambda random, count: np.zeros(count)


def poisson_arrivals(rate: float) -> Arrivals:
    """Independent arrivals, `rate` a second: the first gap and all others are exponential."""
    _more_than("rate", rate, 0)
    return lambda random, count: np.cumsum(random.exponential(1 / rate, count))


def bursty_arrivals(rate: float, burst: int) -> Arrivals:
    """Bursts of `burst` requests at one instant; the bursts arrive independently, `rate` requests a second in all."""
    _more_than("rate", rate, 0)
    _at_least("burst", burst, 1)

    def draw(random: np.random.Generator, count: int) -> np.ndarray:
        starts = np.cumsum(random.exponential(burst / rate, -(-count // burst)))
        return np.repeat(starts, burst)[:count]

    return draw


def make_requests(
    count: int, *, prompt: Law, output: Law, arrivals: Arrivals | None = None, seed: int = 0
) -> list[Request]:
    """`count` requests in order of arrival, ids 0, 1, 2, ...; all at time 0 unless `arrivals` is given.

    The same seed gives the same trace. Prompt lengths, output lengths and arrivals are drawn from streams of their own,
    so changing one law leaves the others as they were. ValueError if a law gives anything but `count` positive numbers.
    """
    _at_least("count", count, 0)
    streams = [np.random.default_rng([seed, stream]) for stream in range(3)]
    prompts, outputs = _lengths("prompt", prompt, streams[0], count), _lengths("output", output, streams[1], count)
    times = (arrivals or at_once())(streams[2], count)
    rows = zip(times, prompts, outputs, strict=True)
    return [Request(i, float(t), int(p), int(o)) for i, (t, p, o) in enumerate(rows)]


def _lengths(name: str, law: Law, random: np.random.Generator, count: int) -> np.ndarray:
    lengths = np.asarray(law(random, count))
    if lengths.shape != (count,) or (count and lengths.min() < 1):
        raise ValueError(f"{name}: a length law must give {count} numbers of at least 1, this one gave {lengths!r}")
    return lengths


def _at_least(name: str, value: float, least: float) -> None:
    if not (math.isfinite(value) and value >= least):
        raise ValueError(f"{name} must be at least {least}, and is {value}")


def _more_than(name: str, value: float, bound: float) -> None:
    if not (math.isfinite(value) and value > bound):
        raise ValueError(f"{name} must be more than {bound}, and is {value}")
