"""What quantization cost a model: perplexity, KL divergence to the unquantized model, top-1 agreement, exact match.

Perplexity alone misleads: on a few thousand tokens it moves by 2 % for nothing, and can fall while the model gets
worse. KL and agreement ask at each token how far the model is from the one it should copy. Each number comes with a
95 % interval of a bootstrap (Efron, 1979) over blocks of neighbouring tokens, as tokens beside each other err together.
Two models are compared pairwise on the same blocks (after Koehn, EMNLP 2004): what makes a block hard for both cancels.
"""

from __future__ import annotations

import contextlib
import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import nn

from labkit.models.sums import Sums, exact_match, few_shot_sums, make_sums

__all__ = [
    "Comparison",
    "Estimate",
    "Quality",
    "Reference",
    "Sums",
    "compare_quality",
    "compare_right",
    "exact_match",
    "few_shot_sums",
    "make_sums",
    "measure_quality",
    "reference_of",
    "share_right",
]

BLOCK = 64  # tokens that are drawn together
DRAWS = 2000
LEVEL = 0.95
WILSON_Z = 1.959964  # of a 95 % interval


@dataclass(frozen=True)
class Estimate:
    """A number and its 95 % interval."""

    value: float
    low: float
    high: float

    def holds(self, value: float) -> bool:
        """Whether `value` lies within the interval."""
        return self.low <= value <= self.high

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


@dataclass(frozen=True)
class Reference:
    """What the unquantized model says. windows: [count, length]; logits: [count, length - 1 - skip, vocab], its dtype.

    skip: tokens at the start of each window that are not judged, beside the first, which nothing predicts.
    """

    windows: torch.Tensor
    logits: torch.Tensor = field(repr=False)
    skip: int = 0


@dataclass(frozen=True)
class Quality:
    """What a model says to each token of a reference's windows: nll and kl in nats, agrees bool; one shape."""

    nll: torch.Tensor
    kl: torch.Tensor
    agrees: torch.Tensor

    @property
    def perplexity(self) -> Estimate:
        """exp of the mean negative log-likelihood."""
        return _exp(_mean(self.nll))

    @property
    def kl_divergence(self) -> Estimate:
        """Mean KL(reference || model) of the next token's distribution, in nats."""
        return _mean(self.kl)

    @property
    def top1(self) -> Estimate:
        """Share of the tokens at which both models think the same token likeliest."""
        return _mean(self.agrees.float())

    def __str__(self) -> str:
        return f"perplexity {self.perplexity}, KL {self.kl_divergence}, top-1 {self.top1}"


@dataclass(frozen=True)
class Comparison:
    """How a second model differs from a first. perplexity: their quotient; kl and top1: their difference."""

    perplexity: Estimate
    kl: Estimate
    top1: Estimate

    @property
    def found(self) -> tuple[str, ...]:
        """The measures whose interval leaves "no difference" out."""
        none = {"perplexity": 1.0, "kl": 0.0, "top1": 0.0}
        return tuple(name for name, value in none.items() if not getattr(self, name).holds(value))


def reference_of(
    model: nn.Module, windows: torch.Tensor, *, skip: int = 0, dtype: torch.dtype | None = None, batch_size: int = 4
) -> Reference:
    """Run the unquantized model over `windows` and keep its logits, on the CPU: count * length * vocab numbers.

    windows: [count, length] token ids. dtype: run a copy of the model in it; bf16 is several times faster on a CPU,
    and then all models should run in it. ValueError for windows of another shape, or with nothing left to judge.
    """
    if windows.dim() != 2 or windows.dtype != torch.int64 or not len(windows):
        raise ValueError(f"windows must be int64 [count, length], and is {windows.dtype} {list(windows.shape)}")
    if not 0 <= skip < windows.shape[1] - 1:
        raise ValueError(f"skip must be from 0 to {windows.shape[1] - 2} for windows of {windows.shape[1]}, not {skip}")
    return Reference(windows, torch.cat(list(_logits(model, windows, skip, dtype, batch_size))), skip)


def measure_quality(
    model: nn.Module, reference: Reference, *, dtype: torch.dtype | None = None, batch_size: int = 4
) -> Quality:
    """What `model` says to the reference's windows. dtype: as in `reference_of`, and the same.

    ValueError if the model's vocabulary is not the reference's.
    """
    nll, kl, agrees = [], [], []
    row = 0
    for logits in _logits(model, reference.windows, reference.skip, dtype, batch_size):
        for mine in logits:  # a window at a time: log-probabilities of a large vocabulary in fp32 take much memory
            theirs, targets = reference.logits[row], reference.windows[row, 1 + reference.skip :]
            if mine.shape != theirs.shape:
                raise ValueError(f"model has a vocabulary of {mine.shape[-1]}, the reference of {theirs.shape[-1]}")
            log_q, log_p = mine.float().log_softmax(-1), theirs.float().log_softmax(-1)
            nll.append(-log_q.gather(-1, targets[:, None])[:, 0])
            kl.append((log_p.exp() * (log_p - log_q)).sum(-1))
            agrees.append(mine.argmax(-1) == theirs.argmax(-1))
            row += 1
    return Quality(torch.stack(nll), torch.stack(kl), torch.stack(agrees))


@torch.no_grad()
def _logits(
    model: nn.Module, windows: torch.Tensor, skip: int, dtype: torch.dtype | None, batch_size: int
) -> Iterator[torch.Tensor]:
    device = next(model.parameters()).device
    with _running_in(model, dtype) as running:
        for batch in windows.split(batch_size):
            yield running(batch.to(device)).logits[:, skip:-1].cpu()


@contextlib.contextmanager
def _running_in(model: nn.Module, dtype: torch.dtype | None) -> Iterator[nn.Module]:
    """`model`, or a copy in `dtype`, with its dropout off."""
    running = model if dtype is None or next(model.parameters()).dtype == dtype else copy.deepcopy(model).to(dtype)
    was_training = running.training
    running.eval()
    try:
        yield running
    finally:
        running.train(was_training)


def compare_quality(first: Quality, second: Quality) -> Comparison:
    """How the second model differs from the first, on the same tokens. ValueError if those cannot be the same."""
    if first.nll.shape != second.nll.shape:
        raise ValueError(f"both must be of the same windows, and are of {first.nll.shape} and {second.nll.shape}")
    return Comparison(
        _exp(_mean(second.nll - first.nll)),
        _mean(second.kl - first.kl),
        _mean(second.agrees.float() - first.agrees.float()),
    )


def share_right(right: torch.Tensor) -> Estimate:
    """Share of exercises answered right; right: [count] bool, of `exact_match`. Interval of Wilson (1927).

    That one is honest at 0 % and 100 % too, where a bootstrap would give an interval of no width.
    """
    count = right.numel()
    if not count:
        raise ValueError("right must hold at least one exercise")
    share, z = right.float().mean().item(), WILSON_Z
    middle = (share + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(share * (1 - share) / count + z * z / (4 * count * count))
    return Estimate(share, min(middle - half, share), max(middle + half, share))


def compare_right(first: torch.Tensor, second: torch.Tensor) -> Estimate:
    """By how much more of the same exercises the second model answers right than the first; both [count] bool."""
    if first.shape != second.shape or first.dim() != 1:
        raise ValueError(f"both must be [count] of the same exercises, and are {first.shape} and {second.shape}")
    return _mean((second.float() - first.float())[None], block=1)


def _mean(values: torch.Tensor, block: int = BLOCK) -> Estimate:
    """The mean of [windows, tokens], with an interval from drawing blocks of neighbours within windows anew."""
    blocks = [part for window in values.double() for part in window.split(block)]
    sums = torch.stack([part.sum() for part in blocks])
    sizes = torch.tensor([float(len(part)) for part in blocks], dtype=torch.float64)
    if len(blocks) == 1:  # drawn anew it is always itself, which is no sign of precision
        return Estimate((sums / sizes).item(), -math.inf, math.inf)
    generator = torch.Generator().manual_seed(0)
    means = []
    for _ in range(DRAWS // 100):  # a hundred at a time: 10,000 exercises drawn 2,000 times would take 160 MB
        drawn = torch.randint(len(blocks), (100, len(blocks)), generator=generator)
        means.append(sums[drawn].sum(1) / sizes[drawn].sum(1))
    tails = torch.tensor([(1 - LEVEL) / 2, (1 + LEVEL) / 2], dtype=torch.float64)
    low, high = torch.cat(means).quantile(tails).tolist()
    return Estimate((sums.sum() / sizes.sum()).item(), low, high)


def _exp(estimate: Estimate) -> Estimate:
    # 700: what exp can still hold; a ruined model's loss may go beyond
    return Estimate(*(math.exp(min(x, 700.0)) for x in (estimate.value, estimate.low, estimate.high)))
