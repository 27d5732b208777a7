"""A number format that exists nowhere: what torch computes is rounded to some width, and no table has the answer."""

from __future__ import annotations

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from labkit.checks.contract import require

STORED = {torch.float32: (24, torch.int32), torch.float64: (53, torch.int64)}  # significant bits, an integer as wide


class Rounded(TorchDispatchMode):
    """While it is on, whatever torch computes in `dtype` has `bits` significant bits: a format that no table lists.

    dtype: float32 or float64. bits: at least 2, fewer than dtype has. Rounds to nearest, ties to even, as IEEE formats
    do. Failed after MOST operations: an answer that waits for a sum to stop may wait for ever.
    """

    MOST = 150_000

    def __init__(self, dtype: torch.dtype, bits: int):
        super().__init__()
        width, self.integer = STORED[dtype]
        self.dtype, self.dropped, self.operations = dtype, width - bits, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        """Run `func` and round what it gives, in place: it may be the tensor that `func` wrote to."""
        out = func(*args, **(kwargs or {}))
        self.operations += 1
        require(self.operations < self.MOST, f"no stall was found in {self.MOST:,} operations: does the sum double?")
        if isinstance(out, torch.Tensor) and out.dtype == self.dtype:
            held = out.view(self.integer)
            below_half = (1 << (self.dropped - 1)) - 1
            odd = (held >> self.dropped) & 1
            rounded = ((held + below_half + odd) >> self.dropped) << self.dropped
            if not torch.equal(rounded, held):
                held.copy_(rounded)
        return out
