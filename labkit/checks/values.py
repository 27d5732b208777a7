"""Comparing what an answer gives, with what to look at said first, and outputs poisoned before the call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest import mock

import torch

from labkit.checks import compare
from labkit.checks.contract import Failed


@contextlib.contextmanager
def poisoned_allocations() -> Iterator[None]:
    """Fill what torch.empty and torch.empty_like give with poison, so that an output nobody writes is seen."""

    def poisoned(make):
        def allocate(*args, **kwargs):
            tensor = make(*args, **kwargs)
            return compare.poison(tensor) if tensor.dtype in compare.POISON_BITS else tensor

        return allocate

    with (
        mock.patch.object(torch, "empty", poisoned(torch.empty)),
        mock.patch.object(torch, "empty_like", poisoned(torch.empty_like)),
    ):
        yield


NOT_ABOUT_VALUES = ("has shape", "has dtype", "was never written", "is of type")


def close(got: object, oracle: torch.Tensor, peer: torch.Tensor, look_at: str, what: str = "o") -> float:
    """compare.close, with `look_at` first in a message about values, NaN and infinities included."""
    try:
        return compare.close(got, oracle, peer, what, look_at=look_at)
    except Failed as failure:
        message = str(failure)
        about_values = not any(words in message for words in NOT_ABOUT_VALUES)
        raise Failed(f"{look_at}: {message}" if about_values and not message.startswith(look_at) else message) from None
