"""Calibration text that is not the evaluation text."""

from __future__ import annotations

import torch

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.cases import LAB, refused

calibration_windows = Question(
    "calibration_windows",
    LAB,
    "no window shares a run of tokens with the evaluation text, and the rest is drawn fairly",
)

LENGTH, NGRAM = 20, 5


def clean(count: int) -> torch.Tensor:
    """Tokens that are in no evaluation text here; windows can be told apart by their numbers."""
    return torch.arange(1000, 1000 + count)


def drawn(answer, tokens: torch.Tensor, evaluation: torch.Tensor, count: int, **options) -> torch.Tensor:
    length = options.pop("length", LENGTH)
    got = answer(tokens, evaluation, count, length, **({"ngram": NGRAM} | options))
    shape = tuple(got.shape) if isinstance(got, torch.Tensor) else type(got).__name__
    require(shape == (count, length), f"{count} windows of {length} tokens have shape {shape}")
    return got


def window_numbers(got: torch.Tensor, tokens: torch.Tensor, length: int = LENGTH) -> list[int]:
    """Which windows of the text they are; Failed if they are none."""
    windows = tokens[: len(tokens) // length * length].reshape(-1, length)
    found = [(windows == row).all(1).nonzero().flatten().tolist() for row in got]
    require(all(found), "what was drawn is no window of the text: they begin at 0, length, 2 * length, ...")
    return [numbers[0] for numbers in found]


@calibration_windows.invariant(
    "a window that holds a run of the evaluation text is refused, wherever the run begins", share=3
)
def _(answer) -> None:
    evaluation = torch.arange(200)
    for at in (0, 1, 7, LENGTH - NGRAM):
        for run in (0, 3, 200 - NGRAM):
            tokens = clean(10 * LENGTH)
            tokens[4 * LENGTH + at : 4 * LENGTH + at + NGRAM] = evaluation[run : run + NGRAM]
            try:
                got = drawn(answer, tokens, evaluation, 9)
            except ValueError as error:
                raise Failed(f"9 of 10 windows are fit, and 9 could not be drawn: {error}") from None
            require(
                4 not in window_numbers(got, tokens),
                f"window 4 shares {NGRAM} tokens, from its token {at}, with the evaluation text, from token {run},"
                " and was drawn: calibration on the evaluation text",
            )


@calibration_windows.invariant("what is shorter than the run, or lies across two windows, is no reason to refuse one")
def _(answer) -> None:
    evaluation, tokens = torch.arange(200), clean(6 * LENGTH)
    tokens[LENGTH + 3 : LENGTH + 3 + NGRAM - 1] = evaluation[50 : 50 + NGRAM - 1]
    tokens[4 * LENGTH - 2 : 4 * LENGTH + 3] = evaluation[80:85]
    tokens[5 * LENGTH : 6 * LENGTH : 2] = evaluation[:10]  # all known tokens, in no run
    try:
        numbers = window_numbers(drawn(answer, tokens, evaluation, 6), tokens)
    except ValueError as error:
        raise Failed(f"all 6 windows are fit, since none holds a run of {NGRAM}: {error}") from None
    require(sorted(numbers) == [0, 1, 2, 3, 4, 5], f"windows {sorted(numbers)} were drawn of 6, each once was expected")


@calibration_windows.invariant("drawn without replacement, by the seed, from all of the text")
def _(answer) -> None:
    tokens, evaluation = clean(50 * LENGTH + 7), torch.arange(30)
    numbers = [window_numbers(drawn(answer, tokens, evaluation, 10, seed=s), tokens) for s in (0, 1, 2, 0)]
    require(all(len(set(n)) == 10 for n in numbers), f"a window was drawn twice: {numbers[0]}")
    require(numbers[0] == numbers[3], "the same seed gave other windows")
    require(numbers[0] != numbers[1], "seeds 0 and 1 gave the same windows")
    union = {n for row in numbers for n in row}
    require(max(union) > 25 and len(union) > 15, f"three draws of 10 of 50 windows gave only windows {sorted(union)}")
    state = torch.random.get_rng_state()
    drawn(answer, tokens, evaluation, 3)
    require(torch.equal(state, torch.random.get_rng_state()), "torch's global generator was used: take one of your own")


@calibration_windows.invariant("too few fit windows are an error that says how many there are")
def _(answer) -> None:
    tokens = clean(5 * LENGTH)
    tokens[:NGRAM] = torch.arange(NGRAM)
    refused(lambda: drawn(answer, tokens, torch.arange(40), 5), ("4",), "5 windows where 4 are fit")
    require(
        len(drawn(answer, clean(40), torch.arange(3), 2)) == 2, "an evaluation text shorter than a run refuses nothing"
    )


QUESTIONS = [calibration_windows]
