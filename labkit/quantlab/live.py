"""SmolLM2 itself, for those who have a minute: what a change of its weights does to a page of Persuasion."""

from __future__ import annotations

import functools
from typing import Any

import torch

from labkit.models import load_model
from labkit.texts import token_windows


@functools.cache
def _loaded() -> tuple[Any, Any]:
    return load_model("smollm2")


def smollm2() -> Any:
    """The model, in fp32. ModelMissing, with what to do, where it is not installed."""
    return _loaded()[0]


@torch.no_grad()
def perplexity(model: Any, length: int = 256) -> float:
    """Of SmolLM2 with any weights, on the first `length` tokens of Persuasion: a rough number, for a look."""
    window = token_windows(_loaded()[1], "persuasion", count=1, length=length)
    return model(window, labels=window).loss.exp().item()
