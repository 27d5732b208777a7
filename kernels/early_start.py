"""Launches that begin before the kernel ahead of them has ended: programmatic dependent launch, of Hopper and later.

A decode step is hundreds of short kernels, and each costs a few microseconds in which memory is idle: the launch, the
first loads, the last program's end. A kernel that starts early does what depends on nobody (planning, loading norm
weights) and then waits; it lets the next one start early in turn. CUDA programming guide, "Programmatic Dependent
Launch"; CUDA graphs keep such edges.

Whatever waits has waited for all kernels before it as well, as long as some program of every early kernel waits.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def let_next_start(EARLY: tl.constexpr):
    """Once all programs of this kernel have come here, those of the next one may begin where there is room."""
    if EARLY:
        gdc_launch_dependents()


@triton.jit
def wait_for_previous(EARLY: tl.constexpr):
    """Go on when the kernel before this one has ended and what it wrote can be read."""
    if EARLY:
        gdc_wait()


@functools.cache
def starts_early(device: torch.device) -> bool:
    """Whether kernels can start early there: compiled, on a Hopper GPU or a later one."""
    compiled = isinstance(let_next_start, triton.JITFunction)
    return compiled and device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9


def early_options(device: torch.device) -> dict[str, bool]:
    """The launch options of a kernel that has EARLY; the interpreter knows no `launch_pdl`, and takes none."""
    early = starts_early(device)
    return {"EARLY": early, "launch_pdl": early} if early else {"EARLY": False}
