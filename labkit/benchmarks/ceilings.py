"""How fast this device's memory is: what a kernel that only reads, and one that copies, reach."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from labkit.benchmarks.timing import race


@triton.jit
def _read_kernel(x_ptr, sums_ptr, per_program, BLOCK: tl.constexpr):
    """Read one stretch of x and keep its sum, so that no load is dead."""
    program = tl.program_id(0).to(tl.int64)
    begin = x_ptr + program * per_program
    total = tl.zeros([BLOCK], tl.float32)
    for first in tl.range(0, per_program, BLOCK, num_stages=4):
        total += tl.load(begin + first + tl.arange(0, BLOCK))  # (BLOCK,)
    tl.store(sums_ptr + program, tl.sum(total))


def memory_ceilings(device: torch.device | str = "cuda", gigabytes: int = 4) -> dict[str, float]:
    """TB/s of a read of this many GB and of a elementwise copy of as many (bytes read plus bytes written)."""
    block, steps = 8192, 32
    programs = gigabytes * 10**9 // (4 * block * steps)
    x = torch.randn(programs, block * steps, device=device)
    y = torch.empty_like(x)
    sums = torch.empty(programs, device=device)

    def read() -> torch.Tensor:
        _read_kernel[(programs,)](x, sums, block * steps, BLOCK=block, num_warps=8)
        return sums

    times = race({"read": [read], "copy": [lambda: torch.add(x, 1.0, out=y)]})
    size = x.numel() * x.element_size() / 1e12
    return {"read": size / times["read"].seconds, "copy": 2 * size / times["copy"].seconds}
