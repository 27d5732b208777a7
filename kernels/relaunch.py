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


class Relauncher:
    """A kernel, and what it was compiled to for the arguments that it had. In the interpreter, it just launches.

    kernel: a function under triton.jit whose constexpr parameters come last, without defaults for those before.
    """

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self._compiled: dict[Hashable, Any] = {}
        parameters = kernel.params if isinstance(kernel, JITFunction) else ()
        self._specialized = [n for n, p in enumerate(parameters) if not (p.is_constexpr or p.do_not_specialize)]

    def __call__(
        self, grid: tuple[int, int, int], arguments: Sequence[Any], constants: Sequence[Any], **options: Any
    ) -> None:
        """Launch. arguments, then constants: all parameters in order, tensors of one device. options: num_warps ..."""
        if not isinstance(self.kernel, JITFunction):
            self.kernel[grid](*arguments, *constants, **options)
            return
        key = self._key(arguments, constants, options)
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[grid](*arguments, *constants)
        else:
            self._compiled[key] = self.kernel[grid](*arguments, *constants, **options)

    def _key(self, arguments: Sequence[Any], constants: Sequence[Any], options: dict[str, Any]) -> Hashable:
        """At least as fine as Triton's own: it tells 1 and multiples of 16 from other integers, and types."""
        device = next(x.device for x in arguments if isinstance(x, torch.Tensor))
        given = [
            (x.dtype, x.data_ptr() % 16 == 0) if isinstance(x, torch.Tensor) else x
            for x in (arguments[n] for n in self._specialized)
        ]
        return (device, *given, *constants, *options.values())
