"""Launching a Triton kernel again: what Triton works out anew for each launch is looked up.

A launch through `kernel[grid](...)` specializes every argument and looks the compiled kernel up by all of that; calling
the compiled kernel itself takes less than half of the host's time. It counts where a launch is short and no CUDA graph
replays it: in an engine's steps that carry prompts, the host is what the GPU waits for.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from triton import JITFunction


class _Launches:
    """What a kernel was compiled to, by whatever Triton specializes on."""

    def __init__(self, kernel: JITFunction) -> None:
        self.kernel = kernel
        self.compiled: dict[Hashable, Any] = {}
        self.specialized = [n for n, p in enumerate(kernel.params) if not (p.is_constexpr or p.do_not_specialize)]

    def key(self, arguments: Sequence[Any], constants: Sequence[Any], options: dict[str, Any]) -> Hashable:
        """At least as fine as Triton's own: it tells 1 and multiples of 16 from other integers, and types."""
        device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
        given = [
            (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else x
            for x in (arguments[n] for n in self.specialized)
        ]
        return (device, *given, *constants, *options.values())


_launches: dict[int, _Launches] = {}


def relaunch(
    kernel: Any, grid: tuple[int, int, int], arguments: Sequence[Any], constants: Sequence[Any], **options: Any
) -> None:
    """Launch a kernel, by way of what it was compiled to for such arguments before. In the interpreter, just launch it.

    kernel: a function under triton.jit whose constexpr parameters come last. arguments, then constants: all of its
    parameters, in order; tensors of one device. options: num_warps and the like.
    """
    if not isinstance(kernel, JITFunction):
        kernel[grid](*arguments, *constants, **options)
        return
    launches = _launches.get(id(kernel))
    if launches is None:
        launches = _launches[id(kernel)] = _Launches(kernel)  # which keeps the kernel, so that its id stays its own
    key = launches.key(arguments, constants, options)
    compiled = launches.compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments, *constants)
    else:
        launches.compiled[key] = kernel[grid](*arguments, *constants, **options)
