"""Bank conflicts of shared memory, counted from two layouts, with no GPU and no kernel.

Shared memory has 32 banks of 4 bytes. A warp's access takes as many passes as the busiest bank has different words to
deliver; each pass beyond what the bytes themselves need is a conflict. Which thread holds which element is one layout,
where each element lies is another, both are known when a kernel is compiled, and Gluon can name them.

    from triton.experimental.gluon import language as gl
    down = gl.BlockedLayout([1, 1], [32, 1], [2, 2], [0, 1])  # lane i reads element (i, j): a column, transposed
    count_conflicts(down, gl.SwizzledSharedLayout(vec=1, per_phase=1, max_phase=1, order=[1, 0]), (64, 64))  # 31

`count_conflicts` asks Triton's compiler, `count_by_address` does the sum. They differ where lanes move under 4 bytes
and the swizzle splits words: lanes 0 and 1 of a transposed fp16 read with vec 1 want words 0 and 32, of one bank, and
the compiler (3.6 and 3.7) counts no conflict, since their addresses also differ inside the word.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from typing import Any

from labkit.compiled.calls import ask_compiler

BITS = {"int8": 8, "fp8": 8, "float16": 16, "bfloat16": 16, "int16": 16, "float32": 32, "int32": 32, "float64": 64}
BANKS, WORD, LANES, WIDEST = 32, 4, 32, 16  # bytes but for the first and third; WIDEST: what a lane moves at a time


class NoCount(RuntimeError):
    """Triton's compiler cannot count for these layouts; for some it ends its process, whose last words are given."""


def count_conflicts(
    registers: Any, shared: Any, shape: Sequence[int], dtype: str = "float16", *, timeout: float = 60.0
) -> int:
    """The compiler's count of conflicts of each pass when a tile moves between registers and shared memory.

    registers: a Gluon layout of the tile over the threads of a block, such as BlockedLayout. shared: a Gluon layout of
    shared memory, such as SwizzledSharedLayout. shape: of the tile. Loads and stores count the same. It is what
    `gl.bank_conflicts` gives inside a kernel, for ordinary ld.shared and st.shared as wide as the layouts allow: 0 is
    best, 31 the worst.

    Runs in a child process. Raises NoCount where the compiler cannot say; for PaddedSharedLayout it aborts.
    """
    sizes = _checked(registers, shared, shape, dtype)
    try:
        return ask_compiler("conflicts", registers, shared, sizes, BITS[dtype], timeout, timeout=timeout)
    except RuntimeError as error:
        raise NoCount(f"{type(shared).__name__}: {error}") from None


def count_by_address(
    registers: Any, shared: Any, shape: Sequence[int], dtype: str = "float16", *, timeout: float = 60.0
) -> int:
    """The same from the byte addresses that the lanes of a warp use: passes needed, less those that the bytes need.

    shared: a SwizzledSharedLayout, of a tile of two dimensions. A lane moves as many neighbouring elements at a time as
    it holds, up to 16 bytes, and a pass serves as many lanes as 128 bytes are for.
    """
    sizes = _checked(registers, shared, shape, dtype)
    if len(sizes) != 2 or type(shared).__name__ != "SwizzledSharedLayout":
        raise ValueError(
            f"shared: a SwizzledSharedLayout of two dimensions, not {type(shared).__name__} of {len(sizes)}"
        )
    itemsize = BITS[dtype] // 8
    linear = ask_compiler("linear", registers, sizes, timeout, timeout=timeout)
    held, lanes, warps = (
        [_offset(base, shared, sizes) for base in bases]
        for bases in (linear.reg_bases, linear.lane_bases, linear.warp_bases)
    )
    wide = 1  # elements: a thread must hold all of them, and every thread in the same order
    while 2 * wide * itemsize <= WIDEST and _spans(held, wide) and not any(base & wide for base in [*lanes, *warps]):
        wide *= 2
    starts = []
    for lane in range(LANES):
        bits = [base for bit, base in enumerate(lanes) if lane >> bit & 1]
        starts.append(functools.reduce(operator.xor, bits, 0) * itemsize)
    at_once = LANES // max(1, wide * itemsize // WORD)
    return max(_turns(starts[n : n + at_once], wide * itemsize) for n in range(0, LANES, at_once)) - 1


def _turns(addresses: Sequence[int], width: int) -> int:
    """Different words that the busiest bank has to deliver when lanes move `width` bytes each."""
    words = {(a + b) // WORD for a in addresses for b in range(0, width, min(width, WORD))}
    return max(sum(word % BANKS == bank for word in words) for bank in range(BANKS))


def _offset(place: Sequence[int], shared: Any, shape: Sequence[int]) -> int:
    """Where the element at `place` lies, in elements: groups of `vec` trade places within their row, by its phase."""
    fast, slow = shared.order
    group, rest = divmod(place[fast], shared.vec)
    phase = place[slow] // shared.per_phase % shared.max_phase
    return place[slow] * shape[fast] + (group ^ phase) * shared.vec + rest


def _spans(bases: Sequence[int], value: int) -> bool:
    """Whether `value` is the exclusive or of some of the bases: Gaussian elimination over bits."""
    reduced: dict[int, int] = {}
    for number in [*bases, value]:
        while number and number.bit_length() in reduced:
            number ^= reduced[number.bit_length()]
        if number:
            reduced[number.bit_length()] = number
        last = number
    return last == 0


def _checked(registers: Any, shared: Any, shape: Sequence[int], dtype: str) -> list[int]:
    if dtype not in BITS:
        raise ValueError(f"dtype: {dtype!r} is not one of {', '.join(BITS)}")
    for name, layout in (("registers", registers), ("shared", shared)):
        if not hasattr(layout, "_to_ir"):
            raise TypeError(f"{name}: expected a Gluon layout, got {type(layout).__name__}")
    sizes = [int(size) for size in shape]
    if any(size < 1 or size & (size - 1) for size in sizes):
        raise ValueError(f"shape: powers of two, not {sizes}")
    return sizes
