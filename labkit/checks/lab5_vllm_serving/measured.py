"""Reading what was measured: log-probabilities beside each other, and the effects of two switches."""

from __future__ import annotations

import math
import random

from labkit.checks.contract import Question, require

LAB = "lab5_vllm_serving"

logprob_gap = Question("logprob_gap", LAB, "two models' answers are compared by their probabilities")
main_effects = Question("main_effects", LAB, "what each switch does is told apart from what both do together")


def normalised(logits: dict[int, float]) -> dict[int, float]:
    """Log-probabilities of these logits."""
    total = math.log(math.fsum(math.exp(value) for value in logits.values()))
    return {token: value - total for token, value in logits.items()}


def gap(reference: dict[int, float], served: dict[int, float]) -> tuple[float, float]:
    """The largest difference over tokens that both list, and the divergence with what one lacks in one rest."""
    both = reference.keys() & served.keys()
    rest_p, rest_q = (max(0.0, 1 - math.fsum(math.exp(m[t]) for t in both)) for m in (reference, served))
    kl = math.fsum(math.exp(reference[t]) * (reference[t] - served[t]) for t in both)
    if rest_p > 1e-9:
        kl += rest_p * math.log(rest_p / max(rest_q, 1e-9))
    return max(abs(reference[t] - served[t]) for t in both), kl


def _gap(answer, reference: dict[int, float], served: dict[int, float], look_at: str) -> None:
    got, want = answer(dict(reference), dict(served)), gap(reference, served)
    require(isinstance(got, tuple | list) and len(got) == 2, f"{look_at}: two numbers were expected, not {got!r}")
    swapped = abs(got[1] - want[0]) < 1e-9 and abs(got[0] - want[1]) < 1e-6 < abs(want[0] - want[1])
    require(not swapped, "the largest difference comes first, then the divergence: yours are the other way round")
    require(abs(got[0] - want[0]) < 1e-9, f"{look_at}: largest difference {got[0]:.6g}, {want[0]:.6g} expected")
    require(abs(got[1] - want[1]) < 1e-6, f"{look_at}: divergence {got[1]:.6g} nats, {want[1]:.6g} expected")


@logprob_gap.invariant("equal models have no gap")
def _(answer) -> None:
    same = normalised({3: 1.0, 9: -0.5, 4: 0.0})
    _gap(answer, same, same, "the same log-probabilities twice")


@logprob_gap.invariant("the divergence is that of served from reference, in nats")
def _(answer) -> None:
    p, q = normalised({1: 2.0, 2: 0.0, 3: -1.0}), normalised({1: 0.5, 2: 0.5, 3: -0.5})
    _gap(answer, p, q, "weigh each difference by the reference's probability")
    _gap(answer, q, p, "the two are no equals: the reference is the first argument")


@logprob_gap.invariant("the largest difference counts whichever way it goes")
def _(answer) -> None:
    p = normalised({1: 0.0, 2: -3.0})
    _gap(answer, p, normalised({1: -0.1, 2: -1.0}), "token 2 is more likely in the served model")
    _gap(answer, p, normalised({1: 0.3, 2: -6.0}), "token 2 is less likely in the served model")


@logprob_gap.invariant("tokens that only one of them lists are one rest on each side")
def _(answer) -> None:
    p, q = normalised({n: -0.4 * n for n in range(8)}), normalised({n: -0.5 * n for n in range(8)})
    top_p, top_q = ({t: m[t] for t in tokens} for m, tokens in ((p, (0, 1, 2, 3)), (q, (0, 1, 2, 5))))
    _gap(answer, top_p, top_q, "a server reports its most likely tokens only: both lack some probability")


@logprob_gap.invariant("random models")
def _(answer) -> None:
    rng = random.Random(6)
    for _ in range(5):
        p, q = (normalised({n: rng.gauss(0, 2) for n in range(50)}) for _ in "pq")
        _gap(answer, p, q, "50 tokens, drawn at random")


Cell = dict[tuple[bool, bool], list[float]]


def effects(cells: Cell) -> dict[str, float]:
    """The factor of each switch on the geometric mean, and the factor by which one changes the other's."""
    log = {key: math.fsum(map(math.log, values)) / len(values) for key, values in cells.items()}
    first = [log[True, b] - log[False, b] for b in (False, True)]
    second = [log[a, True] - log[a, False] for a in (False, True)]
    found = {"caching": sum(first) / 2, "graphs": sum(second) / 2, "interaction": first[1] - first[0]}
    return {name: math.exp(value) for name, value in found.items()}


def _effects(answer, cells: Cell, look_at: str) -> None:
    got, want = answer({key: list(values) for key, values in cells.items()}), effects(cells)
    require(isinstance(got, dict) and got.keys() == want.keys(), f"{look_at}: {got!r}, the keys of {want} expected")
    for name, value in want.items():
        require(
            math.isclose(got[name], value, rel_tol=1e-9), f"{look_at}: {name} {got[name]:.6g}, {value:.6g} expected"
        )


def product(base: float, caching: float, graphs: float, both: float = 1.0) -> Cell:
    """Cells of two runs each in which every switch multiplies the time by its factor, and both together by `both`."""
    return {
        (c, g): [base * (caching if c else 1) * (graphs if g else 1) * (both if c and g else 1) * wobble
                 for wobble in (0.8, 1.25)]
        for c in (False, True) for g in (False, True)
    }  # fmt: skip


@main_effects.invariant("a switch that does nothing has the factor 1")
def _(answer) -> None:
    _effects(answer, product(100.0, 1.0, 1.0), "all four cells alike")


@main_effects.invariant("each switch's factor is found, whatever the other does")
def _(answer) -> None:
    _effects(answer, product(100.0, 0.25, 1.0), "caching divides by four")
    _effects(answer, product(100.0, 1.0, 0.5), "graphs halve")
    _effects(answer, product(100.0, 0.25, 0.5), "both at once")


@main_effects.invariant("runs are averaged by their logarithms")
def _(answer) -> None:
    cells = product(10.0, 0.5, 0.5)
    cells[True, True] = [1.0, 100.0]
    _effects(answer, cells, "one slow run must not outweigh ten fast ones")


@main_effects.invariant("what both do together beyond their product is the interaction")
def _(answer) -> None:
    _effects(answer, product(100.0, 0.5, 0.5, both=1.44), "with caching on, graphs bring less")
    _effects(answer, product(100.0, 0.5, 0.5, both=0.49), "with caching on, graphs bring more")


QUESTIONS = [logprob_gap, main_effects]
