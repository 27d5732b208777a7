"""Generated arithmetic: exercises whose answers are known, for the model that ships and for any language model.

A model that still computes after quantization has lost nothing that matters; one whose perplexity rose by 2 % may or
may not. Exercises are drawn anew from a seed, so that none of them can have been learnt by heart.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import torch

VOCABULARY = "\n0123456789+-="
DIGITS = 3
PROMPT_LENGTH = 2 * DIGITS + 2  # "012+345="
ANSWER_LENGTH = DIGITS + 1


@dataclass(frozen=True)
class Sums:
    """Exercises with their answers. tokens: [count, length] int64, padded at the end; is_answer: bool, likewise."""

    tokens: torch.Tensor
    is_answer: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)


def make_sums(count: int, seed: int) -> Sums:
    """`count` exercises for the arithmetic model, "012+345=0357" and a newline, a character a token: [count, 13].

    As many sums as differences, in chance order; no difference is negative. The answer is the four digits. ValueError
    if count is below 1.
    """
    if count < 1:
        raise ValueError(f"count must be at least 1, and is {count}")
    generator = torch.Generator().manual_seed(seed)
    a, b = torch.randint(0, 10**DIGITS, (2, count), generator=generator)
    minus = torch.randint(0, 2, (count,), generator=generator).bool()
    a, b = torch.where(minus, torch.maximum(a, b), a), torch.where(minus, torch.minimum(a, b), b)
    sign = torch.where(minus, torch.tensor(VOCABULARY.index("-")), torch.tensor(VOCABULARY.index("+")))
    equals, newline = (torch.full((count, 1), VOCABULARY.index(c)) for c in "=\n")
    result = torch.where(minus, a - b, a + b)
    parts = [_digits(a, DIGITS), sign[:, None], _digits(b, DIGITS), equals, _digits(result, ANSWER_LENGTH), newline]
    tokens = torch.cat(parts, 1)
    is_answer = torch.zeros_like(tokens, dtype=torch.bool)
    is_answer[:, PROMPT_LENGTH : PROMPT_LENGTH + ANSWER_LENGTH] = True
    return Sums(tokens, is_answer)


def _digits(numbers: torch.Tensor, width: int) -> torch.Tensor:
    return numbers[:, None] // 10 ** torch.arange(width - 1, -1, -1) % 10 + VOCABULARY.index("0")


def few_shot_sums(tokenizer: Any, count: int, seed: int, digits: tuple[int, int] = (1, 1), shots: int = 8) -> Sums:
    """`count` sums for a language model, "3 + 4 = 7" in a line, after the same `shots` lines that show how it goes.

    tokenizer: a transformers tokenizer. digits: those of the first and of the second number, no leading zeros. The
    answer is the number and the end of its line. ValueError names an argument that is out of range.
    """
    if count < 1 or shots < 0 or min(digits) < 1:
        raise ValueError(f"count and digits must be at least 1, shots at least 0: {count}, {digits}, {shots}")
    rng = random.Random(seed)

    def number(width: int) -> int:
        return rng.randint(10 ** (width - 1) if width > 1 else 0, 10**width - 1)

    drawn = [(number(digits[0]), number(digits[1])) for _ in range(shots + count)]
    shown = "".join(f"{a} + {b} = {a + b}\n" for a, b in drawn[:shots])
    rows = []
    for a, b in drawn[shots:]:
        texts = (f"{shown}{a} + {b} =", f" {a + b}\n")
        rows.append([tokenizer(text, add_special_tokens=False).input_ids for text in texts])
    length = max(len(prompt) + len(answer) for prompt, answer in rows)
    tokens = torch.zeros(count, length, dtype=torch.int64)
    is_answer = torch.zeros(count, length, dtype=torch.bool)
    for row, (prompt, answer) in enumerate(rows):
        tokens[row, : len(prompt) + len(answer)] = torch.tensor(prompt + answer)
        is_answer[row, len(prompt) : len(prompt) + len(answer)] = True
    return Sums(tokens, is_answer)


@torch.no_grad()
def exact_match(model: torch.nn.Module, sums: Sums, batch_size: int = 1000) -> torch.Tensor:
    """Which exercises the model answers right, greedily and to the last token: [count] bool, on the CPU.

    One forward pass finds it: greedy decoding writes the right answer exactly when, after each part of the right
    answer, the most likely token is the right one.
    """
    device = next(model.parameters()).device
    right = []
    for tokens, is_answer in zip(sums.tokens.split(batch_size), sums.is_answer.split(batch_size), strict=True):
        best = model(tokens[:, :-1].to(device)).logits.argmax(-1).cpu()
        right.append(((best == tokens[:, 1:]) | ~is_answer[:, 1:]).all(1))
    return torch.cat(right)
