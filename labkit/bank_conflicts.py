"""Bank conflicts of shared memory, counted by Triton's compiler from two layouts, with no GPU and no kernel.

Shared memory has 32 banks of 4 bytes. A warp's access takes as many passes as the busiest bank has different words to
deliver; each pass beyond what the bytes themselves need is a conflict. Which thread holds which element is one layout,
where each element lies is another, both are known to the compiler, and Gluon can name them.

    from triton.experimental.gluon import language as gl
    down = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])  # lane i reads element (i, j): a column, transposed
    count_conflicts(down, gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]), (64, 64))  # 31
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from labkit.compiled.calls import ask_compiler

BITS = {"int8": 8, "fp8": 8, "float16": 16, "bfloat16": 16, "int16": 16, "float32": 32, "int32": 32, "float64": 64}


class NoCount(RuntimeError):
    """Triton's compiler cannot count for these layouts; for some it ends its process, whose last words are given."""


def count_conflicts(
    registers: Any, shared: Any, shape: Sequence[int], dtype: str = "float16", *, timeout: float = 60.0
) -> int:
    """Conflicts of each pass when a tile moves between registers and shared memory: 0 is best, 31 the worst.

    registers: a Gluon layout of the tile over the threads of a block, such as BlockedLayout. shared: a Gluon layout of
    shared memory, such as SwizzledSharedLayout. shape: of the tile. Loads and stores count the same. The count is the
    compiler's own, for ordinary ld.shared and st.shared as wide as the layouts allow.

    Runs in a child process. Raises NoCount where the compiler cannot say; for PaddedSharedLayout it aborts.
    """
    if dtype not in BITS:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(BITS)}")
    for name, layout in (("registers", registers), ("shared", shared)):
        if not hasattr(layout, "_to_ir"):
            raise TypeError(f"{name}: expected a Gluon layout, got {type(layout).__name__}")
    sizes = [int(size) for size in shape]
    if any(size < 1 or size & (size - 1) for size in sizes):
        raise ValueError(f"shape: powers of two, not {sizes}")
    try:
        return ask_compiler("conflicts", registers, shared, sizes, BITS[dtype], timeout, timeout=timeout)
    except RuntimeError as error:
        raise NoCount(f"{type(shared).__name__}: {error}") from None
