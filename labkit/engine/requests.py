"""What goes into the engine and what comes out: a request, how to sample for it, and the tokens it gets."""

from __future__ import annotations

import math
from collections.abc import Sequence as Sized
from dataclasses import dataclass, field
from enum import Enum

from labkit.sequences import Sequence


class Status(Enum):
    """Where a request is. The last three are final: a request in one of them owns no block."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"
    CANCELLED = "cancelled"
    FAILED = "failed"

    @property
    def final(self) -> bool:
        """Whether nothing will happen to the request any more."""
        return self in (Status.FINISHED, Status.CANCELLED, Status.FAILED)


class EngineError(RuntimeError):
    """A step failed. Its requests are FAILED and have returned their blocks; the engine can go on with the others."""


@dataclass(frozen=True)
class SamplingParams:
    """How tokens are chosen and when to stop. ValueError for values out of range.

    max_tokens: the most tokens to generate; the model's length may end a request earlier. temperature: 0 is greedy.
    top_p: sample from the smallest set of most likely tokens with at least this probability. seed: with the position,
    it alone decides the random numbers, so neither batch nor preemption changes what is sampled. stop_token_ids: end
    with any of these, besides the model's own end token, which ignore_eos switches off.
    """

    max_tokens: int = 16
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False

    def __post_init__(self):
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, and is {self.max_tokens}")
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ValueError(f"temperature must be a finite number of at least 0, and is {self.temperature}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be more than 0 and at most 1, and is {self.top_p}")
        if not 0 <= self.seed < 2**31:
            raise ValueError(f"seed must be in 0..2**31 - 1, and is {self.seed}")


@dataclass(eq=False)
class Request(Sequence):
    """A sequence with what the scheduler needs to know of it.

    id: in order of arrival. tokens: -1 - i stands for the token in row i of the last launch, which is still on its way.
    arrival: the step it came in. priority: lower is served first. cached: tokens that the prefix cache spared at the
    last admission. hashes: of its first full blocks, as far as they are known. error: why it FAILED.
    """

    params: SamplingParams = field(default_factory=SamplingParams)
    prompt_len: int = 0
    priority: int = 0
    arrival: int = 0
    status: Status = Status.WAITING
    reason: str = ""
    cached: int = 0
    preemptions: int = 0
    hashes: list[bytes] = field(default_factory=list)
    error: BaseException | None = None

    @property
    def output(self) -> list[int]:
        """The tokens generated so far, as far as they have come."""
        return self.tokens[self.prompt_len : len(self.tokens) - (self.tokens[-1] < 0)]

    @property
    def pending(self) -> int:
        """Tokens whose K and V are still to be computed: 1 in decoding, 0 while the last token is on its way."""
        return len(self.tokens) - self.num_computed


@dataclass(frozen=True)
class Emitted:
    """One token of one request, as it leaves a step. reason: "" or why the request ends: "stop" or "length"."""

    request: Request
    token: int
    reason: str = ""


def check_prompt(prompt: Sized[int], vocab_size: int, max_model_len: int) -> list[int]:
    """The prompt as a list. ValueError if it is empty, too long to generate anything after, or holds no token id."""
    tokens = [int(t) for t in prompt]
    if not tokens:
        raise ValueError("prompt must hold at least one token, and is empty")
    if len(tokens) >= max_model_len:
        raise ValueError(
            f"prompt has {len(tokens)} tokens: the model's length is {max_model_len}, and at least one token of it is"
            " needed for the answer"
        )
    for i, token in enumerate(tokens):
        if not 0 <= token < vocab_size:
            raise ValueError(f"prompt[{i}] must be a token id in 0..{vocab_size - 1}, and is {token}")
    return tokens
