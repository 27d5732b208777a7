"""What the int4 kernels share: how four bits become a float, how work is shared out, where partial sums are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.validate import require

# A nibble in the lowest mantissa bits of the float MAGIC, all of whose other mantissa bits are zero, is MAGIC + nibble.
MAGIC_FLOAT16 = tl.constexpr(1024.0)
MAGIC_BFLOAT16 = tl.constexpr(128.0)


@triton.constexpr_function
def dequantize_asm(dtype):
    """PTX that makes the 8 elements of a word: operands 0 to 7, 16 bits each, of 8, the word, and 9 and 10.

    Nibble i and nibble i + 4 are the neighbours 2i and 2i + 1 in K, so that one mask and one magic number make two
    elements. Operand 9 has the scale (lower half) and MAGIC plus zero point, negated (upper half), of elements 0, 1, 4
    and 5; operand 10 of the others, which lie 8 rows below. (MAGIC + q) - (MAGIC + zero) is exact, so the only rounding
    is that of the product with the scale. fma, since sm_80 has no bfloat16 add.
    """
    magic, one, kind = (
        ("0x43004300", "0x3f803f80", "bf16x2") if dtype == tl.bfloat16 else ("0x64006400", "0x3c003c00", "f16x2")
    )
    lines = [
        ".reg .b32 t, a, b, c, d, s, z, u, y, one, none;",
        f"mov.b32 one, {one};",
        "mov.b32 none, 0x80008000;",
        "prmt.b32 s, $9, $9, 0x1010;",
        "prmt.b32 z, $9, $9, 0x3232;",
        "prmt.b32 u, $10, $10, 0x1010;",
        "prmt.b32 y, $10, $10, 0x3232;",
        f"lop3.b32 a, $8, 0x000f000f, {magic}, 0xea;",
    ]
    for place, name in ((4, "b"), (8, "c"), (12, "d")):
        lines += [f"shr.b32 t, $8, {place};", f"lop3.b32 {name}, t, 0x000f000f, {magic}, 0xea;"]
    lines += [f"fma.rn.{kind} {name}, {name}, one, {zero};" for name, zero in zip("abcd", "zyzy", strict=True)]
    lines += [f"fma.rn.{kind} {name}, {name}, {scale}, none;" for name, scale in zip("abcd", "susu", strict=True)]
    lines += [f"mov.b32 {{${2 * i}, ${2 * i + 1}}}, {name};" for i, name in enumerate("abcd")]
    return "{ " + " ".join(lines) + " }"


def share_out(tiles: int, steps: int, places: int, parting: int) -> tuple[int, int]:
    """How many programs work on `tiles` output tiles of `steps` each, and how many steps stay together.

    places: programs that the device runs at once. parting: what adding up a parted tile costs, in steps. Whole tiles
    where they nearly fill the places, else parts of them.
    """
    best = (float("inf"), 0, 0)
    for unit in range(steps, 0, -1):
        if steps % unit == 0:
            units = tiles * (steps // unit)
            programs = min(places, units)
            longest = -(-units // programs)
            programs = -(-units // longest)  # no more than it takes
            whole = longest * unit % steps == 0 and units % programs == 0
            cost = longest * unit + (0 if whole else parting)
            if cost < best[0]:
                best = (cost, programs, unit)
    return best[1], best[2]


@dataclass(frozen=True)
class Workspace:
    """Scratch memory of `int4_matmul`. parts: partial sums, float32. arrivals: int32, zero between calls."""

    parts: torch.Tensor
    arrivals: torch.Tensor

    @classmethod
    def allocate(cls, device: torch.device | str, elements: int = 1 << 24, counters: int = 4096) -> Workspace:
        """Enough for any product on any GPU so far, if the sizes are left out: 64 MiB."""
        return cls(
            torch.empty(elements, dtype=torch.float32, device=device),
            torch.zeros(counters, dtype=torch.int32, device=device),
        )

    @classmethod
    def of(cls, given: Workspace | None, device: torch.device, elements: int, counters: int) -> Workspace:
        """`given` if it suffices, a new one if it is None. ValueError otherwise."""
        if given is None:
            return cls.allocate(device, elements, counters)
        require(
            given.parts.numel() >= elements and given.arrivals.numel() >= counters and given.parts.device == device,
            f"workspace: expected {elements} partial sums and {counters} counters on {device};"
            " Workspace.allocate(device) fits",
        )
        return given
