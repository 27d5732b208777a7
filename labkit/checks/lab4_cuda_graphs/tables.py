"""The second bug hunt: the block table that a captured decode step reads."""

from __future__ import annotations

import functools

import torch

from labkit.checks.contract import Question, require
from labkit.checks.lab4_cuda_graphs.cases import CountedCapture, random, refused
from labkit.checks.values import close

LAB = "lab4_cuda_graphs"

fixed_captured_decode = Question("fixed_captured_decode", LAB, "the longest sequence is read to its last token")

DIM = 8


def _made(answer, max_model_len: int, block_size: int):
    capture = CountedCapture()
    cache = random(30, block_size, DIM, seed=max_model_len)
    return answer(3, max_model_len, block_size, cache, capture), cache, capture


def _expected(q: torch.Tensor, cache: torch.Tensor, blocks: list[list[int]], lens: list[int]) -> torch.Tensor:
    rows = []
    for row, (ids, length) in enumerate(zip(blocks, lens, strict=True)):
        keys = cache[torch.tensor(ids, device=cache.device)].flatten(0, 1)[:length]
        rows.append((keys @ q[row]).softmax(0) @ keys)
    return torch.stack(rows)


@fixed_captured_decode.invariant("sequences of any length that may come, the longest included", share=3)
def _(answer) -> float:
    ratios = [0.0]
    for max_model_len, block_size in ((16, 4), (15, 4), (8, 8), (20, 5), (1, 4)):
        made, cache, capture = _made(answer, max_model_len, block_size)
        for length in range(1, max_model_len + 2):
            lens = [length, max(1, length - 1), 1]
            free = iter(torch.randperm(30, generator=torch.Generator().manual_seed(length)).tolist())
            blocks = [[next(free) for _ in range(-(-n // block_size))] for n in lens]
            q = random(3, DIM, seed=length)
            exact = _expected(q.double(), cache.double(), blocks, lens)
            look_at = (
                f"max_model_len {max_model_len}, blocks of {block_size}, a step that attends to {length} tokens in"
                f" {len(blocks[0])} blocks: is the captured table wide enough?"
            )
            peer = _expected(q, cache, blocks, lens) * (1 + 1e-6)  # any order of summing is fine
            ratios.append(close(made(q, blocks, lens), exact, peer, look_at))
        require(capture.captures == 1, f"{capture.captures} captures for sequences of all lengths, 1 expected")
    return max(ratios)


@fixed_captured_decode.invariant("what has no place is refused by its row, not cut off")
def _(answer) -> None:
    made, _, capture = _made(answer, 16, 4)
    capture.replays = 0
    q = random(3, DIM)
    for length in (30, 9):  # blocks may be lent before their tokens come
        refused(
            functools.partial(made, q, [[1], [2], [3, 4, 5, 6, 7, 8, 9, 10]], [1, 1, length]),
            "2",
            f"row 2 with {length} tokens in 8 blocks, where 5 columns hold 17 tokens,",
        )
    require(capture.replays == 0, "the refused step was replayed")


QUESTIONS = [fixed_captured_decode]
