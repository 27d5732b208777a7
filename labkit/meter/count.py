"""What a call asked for, as numbers: the results of the meter."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

MAX_REPORTS = 20  # accesses outside a tensor that are kept, each standing for all lanes of one operation


@dataclass(frozen=True)
class Outside:
    """A load, store or atomic that left its tensor.

    op: "load", "store" or "atomic". argument: the kernel's name for the tensor the pointer was derived from, "" if it
    came from none. offset: of the first such lane, in elements from the tensor's first (bytes where argument is "").
    elements: from the tensor's first to its last element, gaps of a strided view included. lanes: how many lanes.
    """

    op: str
    kernel: str
    argument: str
    offset: int
    elements: int
    lanes: int
    program: tuple[int, int, int]

    def __str__(self) -> str:
        lanes = f"{self.lanes} lane{'s' if self.lanes > 1 else ''} of a {self.op} in program {self.program}"
        if not self.argument:
            return f"{self.kernel}: {lanes} used a pointer that was derived from no tensor of the launch"
        if 0 <= self.offset < self.elements:
            return f"{self.kernel}: {lanes} fell into a gap between the elements of `{self.argument}`, at {self.offset}"
        return (
            f"{self.kernel}: {lanes} left `{self.argument}`: the first at element {self.offset}, "
            f"and it has {self.elements}"
        )


@dataclass
class Tally:
    """Counts of one kernel, summed over all its programs and launches.

    loads, stores, atomics, dots: operations that programs executed. loaded, stored: bytes by tensor argument, of
    unmasked lanes, before any cache; an atomic counts in both. dot_flops: 2 * M * N * K per dot.
    """

    launches: int = 0
    programs: int = 0
    loads: int = 0
    stores: int = 0
    atomics: int = 0
    dots: int = 0
    dot_flops: int = 0
    loaded: dict[str, int] = field(default_factory=dict)
    stored: dict[str, int] = field(default_factory=dict)

    @property
    def bytes_loaded(self) -> int:
        """Bytes that unmasked lanes loaded."""
        return sum(self.loaded.values())

    @property
    def bytes_stored(self) -> int:
        """Bytes that unmasked lanes stored."""
        return sum(self.stored.values())


@dataclass(frozen=True)
class Count:
    """What one Python call asked for. Totals over its kernels are properties; `kernels` has one Tally by kernel name.

    outside: accesses outside their tensor, the first 20; empty for a correct kernel. result: what the call returned,
    its tensors on the CPU.
    """

    kernels: dict[str, Tally]
    outside: tuple[Outside, ...]
    result: Any = None

    def _total(self, name: str) -> int:
        return sum(getattr(tally, name) for tally in self.kernels.values())

    @property
    def launches(self) -> int:
        """Kernel launches of the call."""
        return self._total("launches")

    @property
    def programs(self) -> int:
        """Programs of all launches."""
        return self._total("programs")

    @property
    def loads(self) -> int:
        """Load operations executed."""
        return self._total("loads")

    @property
    def stores(self) -> int:
        """Store operations executed."""
        return self._total("stores")

    @property
    def atomics(self) -> int:
        """Atomic operations executed."""
        return self._total("atomics")

    @property
    def dots(self) -> int:
        """tl.dot operations executed."""
        return self._total("dots")

    @property
    def dot_flops(self) -> int:
        """FLOPs of all dots, a multiply and an add counted as two."""
        return self._total("dot_flops")

    @property
    def bytes_loaded(self) -> int:
        """Bytes loaded by unmasked lanes, before any cache."""
        return self._total("bytes_loaded")

    @property
    def bytes_stored(self) -> int:
        """Bytes stored by unmasked lanes."""
        return self._total("bytes_stored")

    @property
    def bytes(self) -> int:
        """Bytes loaded and stored."""
        return self.bytes_loaded + self.bytes_stored

    def __str__(self) -> str:
        """A table, one line a kernel."""
        head = f"{'kernel':<28}{'launches':>9}{'programs':>9}{'loads':>8}{'stores':>8}{'dots':>7}"
        lines = [f"{head}{'bytes loaded':>14}{'bytes stored':>14}{'dot FLOPs':>14}"]
        for name, t in self.kernels.items():
            lines.append(
                f"{name:<28}{t.launches:>9,}{t.programs:>9,}{t.loads:>8,}{t.stores:>8,}{t.dots:>7,}"
                f"{t.bytes_loaded:>14,}{t.bytes_stored:>14,}{t.dot_flops:>14,}"
            )
        return "\n".join([*lines, *(f"OUTSIDE  {access}" for access in self.outside)])


class Counter:
    """Collects what `triton_internals.observe` reports."""

    def __init__(self) -> None:
        self.kernels: dict[str, Tally] = {}
        self.outside_accesses: list[Outside] = []
        self._kernel = ""
        self._tally = Tally()

    def launch(self, kernel: str, grid: tuple[int, int, int]) -> None:
        """A kernel starts."""
        self._kernel, self._tally = kernel, self.kernels.setdefault(kernel, Tally())
        self._tally.launches += 1
        self._tally.programs += grid[0] * grid[1] * grid[2]

    def access(self, op: str, tensor: Any, lanes: int, itemsize: int, first: bool) -> None:
        """Lanes of one operation that meant one tensor; `first` once per operation."""
        tally, name = self._tally, tensor.name if tensor else ""
        if first:
            counter = {"load": "loads", "store": "stores", "atomic": "atomics"}[op]
            setattr(tally, counter, getattr(tally, counter) + 1)
        for side, kinds in ((tally.loaded, ("load", "atomic")), (tally.stored, ("store", "atomic"))):
            if lanes and op in kinds:
                side[name] = side.get(name, 0) + lanes * itemsize

    def outside(self, op: str, tensor: Any, offset: int, lanes: int, program: tuple[int, int, int]) -> None:
        """Lanes that left their tensor; `offset` in bytes."""
        if len(self.outside_accesses) < MAX_REPORTS:
            name, item = (tensor.name, tensor.itemsize) if tensor else ("", 1)
            elements = tensor.nbytes // item if tensor else 0
            self.outside_accesses.append(Outside(op, self._kernel, name, offset // item, elements, lanes, program))

    def dot(self, m: int, n: int, k: int, batch: int) -> None:
        """One tl.dot of (batch, m, k) with (batch, k, n)."""
        self._tally.dots += 1
        self._tally.dot_flops += 2 * batch * m * n * k

    def count(self, result: Any) -> Count:
        """All of it, and the call's result."""
        return Count(self.kernels, tuple(self.outside_accesses), result)
