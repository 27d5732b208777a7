"""Elements that two programs of one launch touch and at least one stores to: where programs race on a GPU.

The interpreter runs programs one after another, so a race may give the right result in any order of them; but who
touched what is the same in every order.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

NOBODY, SEVERAL = -1, -2
MAX_CONFLICTS = 20
VERBS = {
    "load": ("loads", "loaded"),
    "store": ("stores", "stored"),
    "atomic": ("atomically updates", "atomically updated"),
}


@dataclass(frozen=True)
class Conflict:
    """Two programs touch the same elements of `argument`, and one of the accesses is a plain store.

    first, second: what each did, "load", "store" or "atomic". element: the first such one, counted in memory from the
    tensor's first. programs: of that element; None for the earlier one where several programs had loaded it. elements:
    how many are touched so by this one operation. Atomics may order the two accesses, which cannot be seen here.
    """

    kernel: str
    argument: str
    first: str
    second: str
    element: int
    elements: int
    programs: tuple[tuple[int, int, int] | None, tuple[int, int, int]]

    def __str__(self) -> str:
        earlier = f"program {self.programs[0]}" if self.programs[0] is not None else "several programs"
        which = f"element {self.element}"
        if self.elements > 1:
            which = f"{self.elements} elements, from {which} on,"
        return (
            f"{self.kernel}: program {self.programs[1]} {VERBS[self.second][0]} {which} of `{self.argument}` that "
            f"{earlier} {VERBS[self.first][1]} in the same launch"
        )


class Shadow:
    """For each element of each tensor of a launch, the program that last did what to it."""

    def __init__(self, kernel: str, grid: tuple[int, int, int]) -> None:
        self.kernel = kernel
        self.grid = grid
        self.found: list[Conflict] = []
        self._last: dict[tuple[str, str], np.ndarray] = {}

    def touch(self, op: str, tensor: Any, elements: np.ndarray, program: tuple[int, int, int]) -> None:
        """Program `program` did `op` to these elements; reports each earlier operation that it conflicts with."""
        number = int(np.ravel_multi_index(program, self.grid))
        for earlier in ("store", "load", "atomic"):
            if "store" in (op, earlier):
                by = self._of(earlier, tensor)[elements]
                self._report(earlier, op, tensor.name, elements, by, (by != NOBODY) & (by != number), program)
        last = self._of(op, tensor)
        before = last[elements]
        last[elements] = np.where((before == NOBODY) | (before == number), number, SEVERAL)

    def _of(self, op: str, tensor: Any) -> np.ndarray:
        if (op, tensor.name) not in self._last:
            self._last[op, tensor.name] = np.full(tensor.nbytes // tensor.itemsize, NOBODY, np.int64)
        return self._last[op, tensor.name]

    def _report(
        self, earlier: str, op: str, name: str, elements: np.ndarray, by: np.ndarray, bad: np.ndarray,
        program: tuple[int, int, int],
    ) -> None:  # fmt: skip
        if not bad.any() or len(self.found) >= MAX_CONFLICTS:
            return
        first = int(bad.argmax())
        other = int(by[first])
        by_whom = None if other == SEVERAL else tuple(map(int, np.unravel_index(other, self.grid)))
        count, element = len(np.unique(elements[bad])), int(elements[first])
        self.found.append(Conflict(self.kernel, name, earlier, op, element, count, (by_whom, tuple(program))))  # type: ignore[arg-type]
