"""Observers: the range of numbers that come in batches, and the grid that covers it.

With the same settings they give the scales and zeros of torch.ao's MinMaxObserver and PerChannelMinMaxObserver, which
students of the camp write themselves.
"""

from __future__ import annotations

import torch

from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, grid_of


class MinMaxObserver:
    """Keeps the lowest and the highest number seen: of all, or of each index of the first dimension.

    scheme: its group_size must be PER_TENSOR or PER_CHANNEL, since activations have no groups that stay.
    """

    def __init__(self, scheme: Scheme) -> None:
        if scheme.group_size not in (PER_TENSOR, PER_CHANNEL):
            raise ValueError(f"scheme.group_size must be PER_TENSOR or PER_CHANNEL, and is {scheme.group_size}")
        self.scheme = scheme
        self.low: torch.Tensor | None = None
        self.high: torch.Tensor | None = None

    def observe(self, x: torch.Tensor) -> torch.Tensor:
        """Widen the range to hold `x`, and give x back. ValueError if it is not finite or its channels are others."""
        if not x.numel():
            return x
        if not bool(torch.isfinite(x).all()):
            raise ValueError("x holds numbers that are not finite: one of them would stretch the grid for good")
        rows = x.detach().float().flatten(1) if self.scheme.group_size == PER_CHANNEL else x.detach().float().flatten()
        low, high = rows.amin(-1), rows.amax(-1)
        if self.low is None or self.high is None:
            self.low, self.high = low, high
        elif low.shape != self.low.shape:
            raise ValueError(f"x has {low.numel()} channels, and what was observed before had {self.low.numel()}")
        else:
            self.low, self.high = torch.minimum(self.low, low), torch.maximum(self.high, high)
        return x

    def grid(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Scales and zeros that cover what was observed. RuntimeError if that was nothing."""
        if self.low is None or self.high is None:
            raise RuntimeError("nothing was observed yet: call observe first")
        return grid_of(self.low, self.high, self.scheme)
