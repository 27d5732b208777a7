"""Watches what kernels do in Triton's interpreter.

To follow a pointer back to its tensor, each tensor of a launch is given a made-up address in a region of its own, far
above any real one. Arithmetic on pointers then keeps the origin, whatever operations it goes through, and loads and
stores, of which the interpreter has four primitives, translate the address back and know which tensor was meant.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter, jit

REGION_BITS = 44  # 16 TiB a tensor, more than any 32-bit offset can leave
HALF = 1 << (REGION_BITS - 1)
FIRST_REGION = 1 << (62 - REGION_BITS)
ALIGNMENT = 0xFFF  # low bits kept from the real address, since descriptors ask for alignment


class Recorder(Protocol):
    """What `observe` reports to."""

    def launch(self, kernel: str, grid: tuple[int, int, int]) -> None: ...
    def access(self, op: str, tensor: Region | None, lanes: int, itemsize: int, first: bool) -> None: ...
    def outside(
        self, op: str, tensor: Region | None, offset: int, lanes: int, program: tuple[int, int, int]
    ) -> None: ...
    def dot(self, m: int, n: int, k: int, batch: int) -> None: ...
    def exponential(self, elements: int) -> None: ...
    def tile(self, shape: tuple[int, ...], live_bytes: int) -> None: ...
    def touch(self, op: str, tensor: Region, offsets: np.ndarray, program: tuple[int, int, int]) -> None: ...


@dataclass(frozen=True)
class Region:
    """A tensor of a launch: its argument name, made-up and real base address, and the bytes that are its own.

    shape, strides: of the tensor, in elements. lattice: (stride, size) per dimension in bytes, largest stride first,
    for a view with gaps; else empty.
    """

    name: str
    base: int
    real: int
    nbytes: int
    itemsize: int
    shape: tuple[int, ...] = ()
    strides: tuple[int, ...] = ()
    lattice: tuple[tuple[int, int], ...] = ()

    def holds(self, offsets: np.ndarray, size: int) -> np.ndarray:
        """For each byte offset (uint64, wrapped when negative), whether `size` bytes there belong to the tensor."""
        inside = offsets <= np.uint64(max(self.nbytes - size, 0)) if self.nbytes else np.zeros(offsets.shape, bool)
        rest = offsets
        for stride, length in self.lattice:
            inside = inside & (rest // np.uint64(stride) < length)
            rest = rest % np.uint64(stride)
        return inside & (rest + np.uint64(size) <= self.itemsize) if self.lattice else inside


def _region(name: str, tensor: torch.Tensor, number: int) -> Region:
    real, item = tensor.data_ptr(), tensor.element_size()
    dims = sorted(
        ((s * item, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1 and s), reverse=True
    )
    extent = sum(s * (n - 1) for s, n in dims) + item if tensor.numel() else 0
    nested = all(
        s >= t * n for (s, _), (t, n) in zip(dims, [*dims[1:], (item, 1)], strict=False)
    )  # no dims: one element
    dense = extent == item * int(np.prod([n for _, n in dims]))
    base = ((FIRST_REGION + number) << REGION_BITS) + HALF + (real & ALIGNMENT)
    lattice = tuple(dims) if nested and not dense else ()
    return Region(name, base, real, extent, item, tuple(tensor.shape), tensor.stride(), lattice)


def observe(recorder: Recorder, order: Callable[[int], np.ndarray] | None = None, touches: bool = False) -> None:
    """From now on, report every launch, access and dot of interpreted kernels in this process to `recorder`.

    There is no way back: call it in a process of its own. Lanes outside their tensor read 0 and write nothing, and
    tl.device_assert counts, which the interpreter by itself ignores.
    order(programs): a permutation, the order in which the programs of a launch run; by default the interpreter's.
    touches: report also each element that is loaded or stored, which is slower.
    """
    _Observer(recorder, order, touches).install()


class _Observer:
    def __init__(self, recorder: Recorder, order: Callable[[int], np.ndarray] | None, touches: bool):
        self.recorder = recorder
        self.order = order
        self.touches = touches
        self.live_bytes = 0
        self.native = interpreter._interpreter
        self.regions: dict[int, Region] = {}
        self.names: dict[int, str] = {}
        self.builder = interpreter.interpreter_builder

    def install(self) -> None:
        builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor
        interpreter._interpreter = self._primitives()
        interpreter._implicit_cvt = self._convert_with(interpreter._implicit_cvt)
        executor._init_args_hst = self._name_arguments_with(executor._init_args_hst)
        interpreter._patch_lang_tensor = _scalars_with(interpreter._patch_lang_tensor)
        builder.create_dot = self._dot_with(builder.create_dot)
        builder.create_exp = self._exponential_with(builder.create_exp)
        builder.create_exp2 = self._exponential_with(builder.create_exp2)
        builder.create_assert = self._assert
        # Device asserts count only in debug mode, in which Triton would check every integer for overflow as well.
        self.builder.options = dataclasses.replace(self.builder.options, debug=True, sanitize_overflow=False)
        self._watch_tiles(interpreter.TensorHandle)
        builder.set_grid_dim = self._launch_with(builder.set_grid_dim)
        builder.set_grid_idx = self._program_with(builder.set_grid_idx)
        run = executor.__call__

        def call(executor: Any, *args: Any, **kwargs: Any) -> None:
            self.kernel = executor.fn.__name__
            self.regions, self.names = {}, {}
            run(executor, *args, **kwargs)

        executor.__call__ = call

    def _primitives(self) -> types.SimpleNamespace:
        """The interpreter's native module with its four memory primitives replaced."""
        own = {name: getattr(self.native, name) for name in dir(self.native) if not name.startswith("__")}
        own |= {"load": self.load, "store": self.store, "atomic_rmw": self.rmw, "atomic_cas": self.cas}
        return types.SimpleNamespace(**own)

    def load(self, ptr: np.ndarray, mask: np.ndarray, other: np.ndarray, dtype: np.dtype) -> np.ndarray:
        ptr, mask = self._resolve("load", ptr, mask, np.dtype(dtype).itemsize)
        return self.native.load(ptr, mask, other, dtype)

    def store(self, ptr: np.ndarray, value: np.ndarray, mask: np.ndarray) -> None:
        ptr, mask = self._resolve("store", ptr, mask, value.dtype.itemsize)
        self.native.store(ptr, value, mask)

    def rmw(self, op: Any, ptr: np.ndarray, value: np.ndarray, mask: np.ndarray, sem: Any) -> np.ndarray:
        ptr, mask = self._resolve("atomic", ptr, mask, value.dtype.itemsize)
        return self.native.atomic_rmw(op, ptr, value, mask, sem)

    def cas(self, ptr: np.ndarray, compare: np.ndarray, value: np.ndarray, sem: Any) -> np.ndarray:
        ptr, mask = self._resolve("atomic", ptr, np.ones(ptr.shape, bool), value.dtype.itemsize)
        if not mask.all():  # the native primitive has no mask
            return np.zeros_like(compare)
        return self.native.atomic_cas(ptr, compare, value, sem)

    def _resolve(self, op: str, ptr: np.ndarray, mask: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Real addresses, and the mask without the lanes that left their tensor; reports both."""
        mask = np.broadcast_to(mask, ptr.shape)
        lanes = int(np.count_nonzero(mask))
        if lanes == 0:
            self.recorder.access(op, None, 0, size, True)
            return ptr, mask
        numbers = ptr >> np.uint64(REGION_BITS)
        first = int(numbers.flat[int(mask.argmax())])
        groups = [first] if (numbers[mask] == first).all() else [int(n) for n in np.unique(numbers[mask])]
        real, allowed = ptr.copy(), mask.copy()
        for number in groups:
            chosen = mask if len(groups) == 1 else mask & (numbers == number)
            region = self.regions.get(number)
            self.recorder.access(op, region, int(np.count_nonzero(chosen)), size, number == groups[0])
            offsets = ptr - np.uint64(region.base if region else 0)
            bad = chosen & ~region.holds(offsets, size) if region else chosen
            if region:
                np.add(offsets, np.uint64(region.real), out=real, where=chosen)
            if bad.any():
                allowed &= ~bad
                self._report(op, region, offsets, bad)
            if self.touches and region:
                self.recorder.touch(op, region, offsets[chosen & ~bad], self.builder.grid_idx)
        return real, allowed

    def _report(self, op: str, region: Region | None, offsets: np.ndarray, bad: np.ndarray) -> None:
        first = int(offsets.flat[int(bad.argmax())])
        signed = first - (1 << 64) if first >> 63 else first
        self.recorder.outside(op, region, signed, int(np.count_nonzero(bad)), self.builder.grid_idx)

    def _name_arguments_with(self, original: Callable) -> Callable:
        def init(executor: Any, args: Any, kwargs: dict) -> tuple:
            host, keywords = original(executor, args, kwargs)
            for name, value in [*zip(executor.arg_names, host, strict=False), *keywords.items()]:
                self._name(name, value)
            self.kept_alive = host, keywords  # ids stay unique while these live
            return host, keywords

        return init

    def _name(self, name: str, value: Any) -> None:
        if isinstance(value, tuple):
            for number, element in enumerate(value):
                self._name(f"{name}[{number}]", element)
        elif isinstance(value, interpreter.TensorDescriptor):
            self.names[id(value.base)] = name
        else:
            self.names[id(value)] = name

    def _convert_with(self, original: Callable) -> Callable:
        def convert(value: Any) -> Any:
            converted = original(value)
            if hasattr(value, "data_ptr") and isinstance(converted, tl.tensor):
                tensor = value.base if isinstance(value, jit.TensorWrapper) else value
                number = len(self.regions)
                region = _region(self.names.get(id(value), "?"), tensor, number)
                self.regions[FIRST_REGION + number] = region
                converted.handle.data = np.array([region.base], dtype=np.uint64)
            return converted

        return convert

    def _dot_with(self, original: Callable) -> Callable:
        def dot(builder: Any, a: Any, b: Any, *rest: Any) -> Any:
            batch, (m, k), n = a.data.shape[:-2], a.data.shape[-2:], b.data.shape[-1]
            self.recorder.dot(m, n, k, int(np.prod(batch)))
            return original(builder, a, b, *rest)

        return dot

    @staticmethod
    def _assert(builder: Any, condition: Any, message: str) -> None:
        if not condition.data.all():
            raise AssertionError(f"{message}, in program {builder.grid_idx}")

    def _exponential_with(self, original: Callable) -> Callable:
        def exponential(builder: Any, x: Any) -> Any:
            self.recorder.exponential(x.data.size)
            return original(builder, x)

        return exponential

    def _watch_tiles(self, handle_type: Any) -> None:
        """Follow the life of each value: the interpreter wraps it in a handle, which dies with the last name for it."""
        check = handle_type.__post_init__

        def born(handle: Any) -> None:
            check(handle)
            if handle.data.size > 1:
                handle.live_bytes = handle.data.nbytes if handle.dtype.is_floating() else 0
                self.live_bytes += handle.live_bytes
                self.recorder.tile(handle.data.shape, self.live_bytes)

        def dead(handle: Any) -> None:
            self.live_bytes -= getattr(handle, "live_bytes", 0)

        handle_type.__post_init__, handle_type.__del__ = born, dead

    def _launch_with(self, original: Callable) -> Callable:
        def dim(builder: Any, *grid: int) -> None:
            self.recorder.launch(self.kernel, (grid[0], grid[1], grid[2]))
            self.permutation = self.order(int(np.prod(grid))) if self.order else None
            original(builder, *grid)

        return dim

    def _program_with(self, original: Callable) -> Callable:
        def program(builder: Any, x: int, y: int, z: int) -> None:
            if self.permutation is not None:
                grid = builder.grid_dim
                drawn = int(self.permutation[(x * grid[1] + y) * grid[2] + z])
                x, y, z = map(int, np.unravel_index(drawn, grid))
            original(builder, x, y, z)

        return program


def _scalars_with(original: Callable) -> Callable:
    """Lets a one-element tensor be an index, as in `range(0, K, BK)`: Triton 3.6 fails at it with NumPy 2.4."""

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patch
