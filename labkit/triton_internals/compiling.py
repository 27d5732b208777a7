"""Has Triton compile for a GPU that is not here. Works only where `@triton.jit` was told to compile."""

from __future__ import annotations

import contextlib
import inspect
import io
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
from triton._C.libtriton import gluon_ir, ir
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource
from triton.compiler.errors import CompilationError
from triton.experimental.gluon._runtime import GluonASTSource
from triton.runtime import autotuner, driver, jit

ALIGNED = [["tt.divisibility", 16]]  # what Triton tells its compiler of a pointer or an integer divisible by 16


@dataclass(frozen=True)
class Build:
    """What Triton's compiler made of one kernel.

    types: argument -> type, with ":16" where it is known to be divisible by 16. constants: argument -> value, written
    out. asm: stage -> text, or bytes for "cubin". ptxas: what the assembler reported. grid: of the launch, None where
    the kernel was compiled by its signature.
    """

    kernel: str
    types: dict[str, str]
    constants: dict[str, str]
    metadata: dict[str, Any]
    asm: dict[str, Any]
    ptxas: str
    grid: tuple[int, ...] | None = None


def target(capability: int) -> GPUTarget:
    """An NVIDIA GPU of this compute capability, such as 90."""
    return GPUTarget("cuda", capability, 32)


def build(
    kernel: Any, signature: dict[str, str], constants: dict[str, Any], capability: int, options: dict[str, Any]
) -> Build:
    """Compile a kernel by its signature: argument -> type as in Build, "i32:1" for an integer known to be 1."""
    aligned = {name for name, kind in signature.items() if kind.endswith(":16")}
    ones = {name: 1 for name, kind in signature.items() if kind.endswith(":1")}
    defaults = {n: p.default for n, p in inspect.signature(kernel.fn).parameters.items() if p.default is not p.empty}
    constants = {**{n: v for n, v in defaults.items() if n not in signature}, **constants, **ones}
    order = kernel.arg_names
    plain = {n: "constexpr" if n in constants else signature[n].partition(":")[0] for n in order}
    attributes = {(order.index(name),): ALIGNED for name in aligned}
    source = (GluonASTSource if kernel.is_gluon() else ASTSource)(
        fn=kernel,
        signature=plain,
        constexprs={(order.index(n),): v for n, v in constants.items()},
        attrs=attributes,
    )
    with _log_of_ptxas() as log:
        compiled = triton.compile(source, target=target(capability), options=options)
    return _build(compiled, log.getvalue(), None)


@contextlib.contextmanager
def recorded_launches(capability: int, num_sms: int) -> Iterator[list[Build]]:
    """Inside, launching a kernel compiles it as that launch would and runs nothing; gives the list of what was built.

    A wrapper that asks whether its kernels are interpreted, and may have CPU tensors, hears yes; Triton's decorator, in
    a module that the call is the first to import, hears no. A wrapper that asks torch for the properties of the device
    hears those of a GPU of this compute capability with `num_sms` SMs.
    """
    builds: list[Build] = []
    original, tuned, knobs = jit.JITFunction.run, autotuner.Autotuner.run, jit.knobs

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        with _log_of_ptxas() as log:
            compiled = original(kernel, *args, grid=grid, warmup=True, **kwargs)
        if callable(grid):
            named = {name: value for name, value in kwargs.items() if name in kernel.arg_names}
            bound = inspect.signature(kernel.fn).bind(*args, **named)
            bound.apply_defaults()
            grid = grid(bound.arguments)
        builds.append(_build(compiled, log.getvalue(), tuple(map(int, grid))))
        return compiled

    def run_tuned(tuner: Any, *args: Any, **kwargs: Any) -> Any:
        if len(tuner.configs) > 1:
            raise ValueError(f"`{tuner.base_fn.__name__}` is autotuned, which needs a GPU: leave it one config")
        return tuner.fn.run(*args, **kwargs, **tuner.configs[0].all_kwargs())

    driver.set_active(_NoDriver(capability))
    jit.JITFunction.run, autotuner.Autotuner.run = run, run_tuned
    jit.knobs = _Knobs(knobs)
    properties: Any = types.SimpleNamespace(
        major=capability // 10, minor=capability % 10, multi_processor_count=num_sms, warp_size=32
    )
    asked = torch.cuda.get_device_properties, torch.cuda.get_device_capability
    torch.cuda.get_device_properties = lambda device=None: properties
    torch.cuda.get_device_capability = lambda device=None: divmod(capability, 10)
    triton.knobs.runtime.interpret = True
    try:
        yield builds
    finally:
        jit.JITFunction.run, autotuner.Autotuner.run, jit.knobs = original, tuned, knobs
        triton.knobs.runtime.interpret = False
        torch.cuda.get_device_properties, torch.cuda.get_device_capability = asked


class _Knobs:
    """Triton's knobs, or one group of them, of which `interpret` is always off."""

    def __init__(self, real: Any) -> None:
        self._real = real

    def __getattr__(self, name: str) -> Any:
        if name == "interpret":
            return False
        return _Knobs(self._real.runtime) if name == "runtime" else getattr(self._real, name)


class _NoDriver:
    """As much of a driver as compiling asks for."""

    def __init__(self, capability: int) -> None:
        self.capability = capability

    def get_current_target(self) -> GPUTarget:
        return target(self.capability)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


@contextlib.contextmanager
def _log_of_ptxas() -> Iterator[io.StringIO]:
    """Collects what the assembler reports, which Triton prints if asked to."""
    log = io.StringIO()
    original = CUDABackend.make_cubin

    def make_cubin(*args: Any) -> Any:
        with contextlib.redirect_stdout(log):
            return original(*args)

    CUDABackend.make_cubin = make_cubin
    triton.knobs.nvidia.dump_ptxas_log = True
    try:
        yield log
    finally:
        CUDABackend.make_cubin = original


def _build(compiled: Any, log: str, grid: tuple[int, ...] | None) -> Build:
    source = compiled.src
    names = source.fn.arg_names
    aligned = {path[0] for path, attributes in source.attrs.items() if len(path) == 1 and ALIGNED[0] in attributes}
    kinds = {n: k + (":16" if names.index(n) in aligned else "") for n, k in source.signature.items()}
    constants = {
        ".".join([names[path[0]], *map(str, path[1:])]): _written(value) for path, value in source.constants.items()
    }
    asm = {stage: compiled.asm[stage] for stage in compiled.asm if stage != "source"}
    metadata = {
        n: getattr(compiled.metadata, n, None) for n in ("num_warps", "num_stages", "num_ctas", "shared", "tmem_size")
    }
    return Build(source.fn.__name__, kinds, constants, metadata, asm, log, grid)


def _written(value: Any) -> str:
    return getattr(value, "__name__", None) or str(value)


def bank_conflicts(registers: Any, shared: Any, shape: list[int], bits: int) -> int:
    """What `gl.bank_conflicts` asks the compiler, without a kernel around it. Some layouts abort the process."""
    _context, builder = _layout_builder()
    return builder.get_shared_bank_conflicts(registers._to_ir(builder), shared._to_ir(builder), shape, bits)


def linear_layout(registers: Any, shape: list[int]) -> Any:
    """A distributed layout as bases: which element each register, lane and warp bit moves to."""
    _context, builder = _layout_builder()
    return builder.to_linear_layout(registers._to_ir(builder), shape)


def _layout_builder() -> tuple[Any, Any]:
    """A context, which its caller must hold as long as the builder, and a builder in it."""
    context = ir.context()
    ir.load_dialects(context)
    CUDABackend(target(80)).load_dialects(context)
    return context, gluon_ir.GluonOpBuilder(context)


def what_failed(error: BaseException) -> str:
    """What the compiler found wrong, in one line, with the line of the kernel where there is one."""
    where = ""
    while isinstance(error, CompilationError):
        if error.node is not None and error.src:
            where = f" (at `{error.src.splitlines()[error.node.lineno - 1].strip()}`)"
        if error.__cause__ is None:
            break
        error = error.__cause__
    message = error.error_message if isinstance(error, CompilationError) else str(error)
    kind = "" if isinstance(error, CompilationError) else f"{type(error).__name__}: "
    return f"{kind}{' '.join(str(message or '').split())}{where}"
