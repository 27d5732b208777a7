"""Texts that ship, for calibration and for evaluation: four excerpts in the public domain (see README.md beside them).

Evaluation reads other books than calibration did: a method that has seen the text it is judged on looks better than it
is. Each pair holds prose of Jane Austen and a dictionary of another time.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

EVALUATION = ("persuasion", "devils_dictionary")
CALIBRATION = ("pride_and_prejudice", "jargon_file")


def read_text(name: str) -> str:
    """The text called `name`, one of EVALUATION and CALIBRATION; ValueError otherwise."""
    if name not in EVALUATION + CALIBRATION:
        raise ValueError(f"name must be one of {', '.join(EVALUATION + CALIBRATION)}, and is {name!r}")
    return (Path(__file__).parent / f"{name}.txt").read_text(encoding="utf-8")


def token_windows(tokenizer: Any, name: str, count: int = 8, length: int = 512) -> torch.Tensor:
    """The first `count` windows of `length` tokens of a text, one after the other: [count, length] int64.

    tokenizer: a transformers tokenizer; no special token is added. ValueError if the text has fewer tokens.
    """
    return cut_windows(tokenizer, read_text(name), name, count, length)


def cut_windows(tokenizer: Any, text: str, name: str, count: int, length: int) -> torch.Tensor:
    """`token_windows` of a text that does not ship. name: for the error of a text that is too short."""
    if count < 1 or length < 2:
        raise ValueError(f"count must be at least 1 and length at least 2, and are {count} and {length}")
    # verbose: the whole text is longer than a model's context, which needs no warning, since windows are cut from it
    ids = tokenizer(text, add_special_tokens=False, verbose=False).input_ids
    if len(ids) < count * length:
        raise ValueError(f"{name} has {len(ids)} tokens: too few for {count} windows of {length}")
    return torch.tensor(ids[: count * length]).reshape(count, length)


def calibration_windows(tokenizer: Any, count: int = 16, length: int = 512) -> torch.Tensor:
    """`count` windows of `length` tokens, as many of each CALIBRATION text, in turn: [count, length] int64.

    ValueError for an odd count, or if a text has too few tokens.
    """
    if count % len(CALIBRATION):
        raise ValueError(f"count must be a multiple of {len(CALIBRATION)}, the number of texts, and is {count}")
    each = [token_windows(tokenizer, name, count // len(CALIBRATION), length) for name in CALIBRATION]
    return torch.stack(each, 1).reshape(count, length)
