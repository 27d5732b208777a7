"""An observer of ranges."""

from __future__ import annotations

from functools import partial

import torch

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.cases import LAB, SHIPPED, grid_of, randn, refused, same_grid
from labkit.checks.lab3_int4_quantization.grids import REFUSED

min_max_observer = Question(
    "min_max_observer", LAB, "the grid covers everything observed, channel by channel if asked", SHIPPED, REFUSED
)


def batches(seed: int, channels: int = 6) -> list[torch.Tensor]:
    """The widest one stands in the middle; each channel has another width."""
    widths = torch.logspace(-1, 1, channels)[:, None, None]
    return [randn(channels, 3, 5, seed=seed + i) * widths * loud for i, loud in enumerate((1.0, 9.0, 0.1))]


def observed(answer, per_channel: bool, seen: list[torch.Tensor]):
    made = answer(per_channel=per_channel)
    for batch in seen:
        made.observe(batch)
    return made


@min_max_observer.invariant("the example of the docstring")
def _(answer) -> None:
    made = observed(answer, False, [torch.tensor([1.0, 3.0]), torch.tensor([-2.0, 0.0])])
    scale, zero = made.grid(4)
    require(
        tuple(scale.shape) == () and abs(scale.item() - 1 / 3) < 1e-6 and int(zero) == 6,
        f"observed [1, 3] and [-2, 0]: scale {scale.tolist()}, zero {zero.tolist()}; 1/3 and 6 expected",
    )


@min_max_observer.invariant("a later, narrower batch does not narrow the range", share=2)
def _(answer) -> None:
    seen = batches(1)
    made = observed(answer, False, seen)
    everything = torch.cat([batch.flatten() for batch in seen])
    for bits, symmetric in ((4, False), (8, False), (8, True)):
        scale, zero = made.grid(bits, symmetric)
        same_grid(
            scale, zero, grid_of(everything, bits, symmetric), "three batches, the widest in the middle: is it kept?"
        )


@min_max_observer.invariant("per channel, the first dimension counts", share=2)
def _(answer) -> None:
    seen = batches(2)
    made = observed(answer, True, seen)
    rows = torch.cat([batch.flatten(1) for batch in seen], 1)
    scale, zero = made.grid(4)
    require(
        tuple(scale.shape) == (6,), f"6 channels of [3, 5] numbers: scale has shape {tuple(scale.shape)}, (6,) expected"
    )
    same_grid(scale, zero, grid_of(rows, 4), "6 channels")


@min_max_observer.invariant("numbers that are not finite are refused and leave no trace")
def _(answer) -> None:
    for bad in (float("nan"), float("inf"), -float("inf")):
        made = observed(answer, False, [torch.tensor([-1.0, 2.0])])
        refused(partial(made.observe, torch.tensor([5.0, bad])), (), f"observing {bad}")
        scale, _ = made.grid(4)
        require(abs(scale.item() - 0.2) < 1e-6, f"after a refused batch the scale is {scale.item()}, 0.2 expected")


@min_max_observer.invariant("with nothing observed there is no grid")
def _(answer) -> None:
    try:
        got = answer().grid(4)
    except RuntimeError as error:
        if not isinstance(error, NotImplementedError):
            return
        raise
    raise Failed(f"nothing was observed, and grid gave {got} where RuntimeError was expected")


QUESTIONS = [min_max_observer]
