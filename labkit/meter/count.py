"""What a call asked for, as numbers: the results of the meter."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import as_strided

from labkit.meter.conflicts import Conflict, Shadow

LOADING, STORING = ("load", "atomic"), ("store", "atomic")
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


@dataclass(frozen=True)
class Follow:
    """Which program's accesses to follow: of launch `launch`, from 0, of `kernel`, the first kernel if None."""

    program: tuple[int, int, int]
    kernel: str | None = None
    launch: int = 0


@dataclass
class Followed:
    """What one program touched. loaded, stored: tensor argument -> how often each element, in the tensor's shape."""

    kernel: str
    grid: tuple[int, int, int]
    program: tuple[int, int, int]
    loaded: dict[str, np.ndarray] = field(default_factory=dict)
    stored: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class Tally:
    """Counts of one kernel, summed over all its programs and launches.

    loads, stores, atomics, dots: operations that programs executed. loaded, stored: bytes by tensor argument, of
    unmasked lanes, before any cache; an atomic counts in both. dot_flops: 2 * M * N * K per dot. exponentials: elements
    that exp or exp2 was taken of, masked lanes included, since they cost as much.
    largest_tile: the shape with the most elements of all values that a program made, addresses and masks included.
    peak_live_bytes: the most that the floating-point tiles of one program came to at a time, counting all that its
    variables and temporaries held, each in its own dtype. A compiler frees a tile after its last use, may fuse it away
    or hold it more than once, so this is what the program as written asks for and not a count of registers.
    """

    launches: int = 0
    programs: int = 0
    loads: int = 0
    stores: int = 0
    atomics: int = 0
    dots: int = 0
    dot_flops: int = 0
    exponentials: int = 0
    largest_tile: tuple[int, ...] = ()
    peak_live_bytes: int = 0
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
    its tensors on the CPU. followed: what the program that was followed touched, if one was. conflicts: elements that
    two programs of a launch touch and one stores to, if they were looked for.
    """

    kernels: dict[str, Tally]
    outside: tuple[Outside, ...]
    result: Any = None
    followed: Followed | None = None
    conflicts: tuple[Conflict, ...] = ()

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
    def exponentials(self) -> int:
        """Elements that exp or exp2 was taken of."""
        return self._total("exponentials")

    @property
    def largest_tile(self) -> tuple[int, ...]:
        """The shape with the most elements of any value that a program made; () if there was no tile at all."""
        return max((tally.largest_tile for tally in self.kernels.values()), key=math.prod, default=())

    @property
    def peak_live_bytes(self) -> int:
        """The most bytes of floating-point tiles that one program held at a time; see Tally."""
        return max((tally.peak_live_bytes for tally in self.kernels.values()), default=0)

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

    def __init__(self, follow: Follow | None = None, conflicts: bool = False) -> None:
        self.kernels: dict[str, Tally] = {}
        self.outside_accesses: list[Outside] = []
        self.follow = follow
        self.followed: Followed | None = None
        self.shadows: list[Shadow] | None = [] if conflicts else None
        self._kernel = ""
        self._tally = Tally()
        self._largest = self._peak = 0
        self._is_followed = False
        self._flat: dict[tuple[str, str], np.ndarray] = {}  # each followed tensor's memory, gaps of a view included

    def launch(self, kernel: str, grid: tuple[int, int, int]) -> None:
        """A kernel starts."""
        self._kernel, self._tally = kernel, self.kernels.setdefault(kernel, Tally())
        self._largest, self._peak = math.prod(self._tally.largest_tile), self._tally.peak_live_bytes
        self._is_followed = self._chosen(kernel, self._tally.launches)
        if self._is_followed and self.follow:
            self.followed = Followed(kernel, grid, self.follow.program)
        if self.shadows is not None:
            self.shadows.append(Shadow(kernel, grid))
        self._tally.launches += 1
        self._tally.programs += grid[0] * grid[1] * grid[2]

    def _chosen(self, kernel: str, launch: int) -> bool:
        if self.follow is None or launch != self.follow.launch:
            return False
        return kernel == (self.follow.kernel or next(iter(self.kernels)))

    def access(self, op: str, tensor: Any, lanes: int, itemsize: int, first: bool) -> None:
        """Lanes of one operation that meant one tensor; `first` once per operation."""
        tally, name = self._tally, tensor.name if tensor else ""
        if first:
            counter = {"load": "loads", "store": "stores", "atomic": "atomics"}[op]
            setattr(tally, counter, getattr(tally, counter) + 1)
        for side, kinds in ((tally.loaded, LOADING), (tally.stored, STORING)):
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

    def exponential(self, elements: int) -> None:
        """One tl.exp or tl.exp2."""
        self._tally.exponentials += elements

    def tile(self, shape: tuple[int, ...], live_bytes: int) -> None:
        """A value came into being; with it, `live_bytes` of floating-point tiles are alive."""
        elements = math.prod(shape)
        if elements > self._largest:
            self._largest, self._tally.largest_tile = elements, tuple(shape)
        if live_bytes > self._peak:
            self._peak = self._tally.peak_live_bytes = live_bytes

    def touch(self, op: str, tensor: Any, offsets: np.ndarray, program: tuple[int, int, int]) -> None:
        """Lanes of one operation inside a tensor; `offsets` in bytes from its first element."""
        elements = (offsets // np.uint64(tensor.itemsize)).astype(np.int64)
        if self.shadows:
            self.shadows[-1].touch(op, tensor, elements, program)
        followed = self.followed
        if not self._is_followed or followed is None or tuple(program) != followed.program:
            return
        for side, kinds in (("loaded", LOADING), ("stored", STORING)):
            if op not in kinds:
                continue
            key = side, tensor.name
            if key not in self._flat:
                flat = self._flat[key] = np.zeros(tensor.nbytes // tensor.itemsize, np.int32)
                strides = [stride * flat.itemsize for stride in tensor.strides]
                getattr(followed, side)[tensor.name] = as_strided(flat, tensor.shape, strides)
            np.add.at(self._flat[key], elements, 1)

    def count(self, result: Any) -> Count:
        """All of it, and the call's result."""
        conflicts = tuple(conflict for shadow in self.shadows or () for conflict in shadow.found)
        return Count(self.kernels, tuple(self.outside_accesses), result, self.followed, conflicts)
