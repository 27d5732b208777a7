"""What one program of a kernel reads and writes, element by element of each tensor: a mask or a stride made visible.

access = map_accesses(Call(copy, (x, out)), program=1)
access.loaded["x_ptr"]  # how often each element of x was loaded
access.chart()
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from labkit.meter import Call, Follow, Outside, measure_many

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class AccessMap:
    """What one program touched.

    loaded, stored: tensor argument -> how often each of its elements was, an integer array of the tensor's shape. A
    tensor that was never touched that way is not there; an atomic does both. outside: the program's accesses that left
    their tensor, which are in neither.
    """

    kernel: str
    grid: tuple[int, int, int]
    program: tuple[int, int, int]
    loaded: dict[str, np.ndarray]
    stored: dict[str, np.ndarray]
    outside: tuple[Outside, ...]

    @property
    def arguments(self) -> tuple[str, ...]:
        """The tensors that were touched, in the order of their first access."""
        return tuple(dict.fromkeys([*self.loaded, *self.stored]))

    def chart(self) -> Figure:
        """A picture of each tensor with the touched elements coloured."""
        from labkit import plots

        return plots.access_chart(self)

    def __str__(self) -> str:
        lines = [f"{self.kernel}, program {self.program} of grid {self.grid}"]
        for name in self.arguments:
            loads, stores = (side.get(name, np.zeros(1, int)) for side in (self.loaded, self.stored))
            size = (loads if name in self.loaded else stores).size
            parts = [
                f"{np.count_nonzero(n):,} {verb}" for n, verb in ((loads, "loaded"), (stores, "stored")) if n.any()
            ]
            again = f", {loads.max()} times at most" if loads.max() > 1 else ""
            lines.append(f"  {name}: {' and '.join(parts)} of {size:,} elements{again}")
        return "\n".join([*lines, *(f"  OUTSIDE  {access}" for access in self.outside)])


def map_accesses(
    call: Call, *, program: int | tuple[int, ...] = 0, kernel: str | None = None, launch: int = 0, timeout: float = 45.0
) -> AccessMap:
    """Run a Python call in the interpreter and follow one program of one of its launches.

    program: its index, or its (x, y, z). kernel: which one, by name; the first that is launched if None. launch: which
    launch of that kernel, from 0. The arguments' tensors are changed as by `meter.measure`, which also says what is
    raised; ValueError where there is no such launch or program.
    """
    index = (program,) if isinstance(program, int) else tuple(program)
    if not 1 <= len(index) <= 3 or any(not isinstance(i, int) or i < 0 for i in index):
        raise ValueError(f"program: expected one to three indices from 0, got {program!r}")
    follow = Follow((*index, 0, 0)[:3], kernel, launch)  # type: ignore[arg-type]
    (count,) = measure_many([call], follow=follow, timeout=timeout)
    followed = count.followed
    if followed is None:
        launches = ", ".join(f"{name} ({tally.launches})" for name, tally in count.kernels.items()) or "none"
        raise ValueError(f"no launch {launch} of kernel {kernel or '(any)'}; launches by kernel: {launches}")
    if any(i >= n for i, n in zip(follow.program, followed.grid, strict=True)):
        raise ValueError(f"program: {follow.program} is not in the grid {followed.grid} of {followed.kernel}")
    outside = tuple(o for o in count.outside if o.kernel == followed.kernel and o.program == follow.program)
    return AccessMap(followed.kernel, followed.grid, followed.program, followed.loaded, followed.stored, outside)
