"""Has a kernel compiled in a process of its own, by its signature or as a Python call would launch it."""

from __future__ import annotations

import ast
import json
from typing import Any

from labkit.compiled.arch import limits_of
from labkit.compiled.report import Compiled, parse_ptxas, threads_of
from labkit.meter import Call
from labkit.servers import Server
from labkit.source import standalone
from labkit.triton_internals import is_kernel, plain_function
from labkit.triton_internals.compiling import Build

# TRITON_DEFAULT_FP_FUSION: Triton 3.9 warns on stderr where it is not set.
_compiler = Server(
    "labkit.compiled.child:answer",
    {"TRITON_INTERPRET": "0", "CUDA_VISIBLE_DEVICES": "", "TRITON_DEFAULT_FP_FUSION": "1"},
)

KEPT = 64  # kernels compiled by their signature, so that running a notebook's cell again costs nothing
_known: dict[str, Compiled] = {}


class CompilationFailed(RuntimeError):
    """The kernel does not compile; the message is what the compiler found, in one line."""


def compile_kernel(
    kernel: Any,
    signature: dict[str, str],
    constexprs: dict[str, Any] | None = None,
    *,
    arch: str = "sm_90",
    num_warps: int = 4,
    num_stages: int = 3,
    name: str | None = None,
    timeout: float = 120.0,
    **options: Any,
) -> Compiled:
    """Compile a Triton or Gluon kernel for `arch` on a machine with no GPU.

    kernel: a `@triton.jit` kernel of a module or of notebook cells, or the source text of a module; then `name` is that
        of the kernel in it.
    signature: argument -> type, for every argument that is no constexpr: "*fp16", "*bf16", "*fp8e4nv", "fp32", "i32",
        "i64", "u1". Pointers are taken to be aligned to 16 bytes, as torch's are. What a launch would find out about
        its integers is said here: "i32:16" is divisible by 16, "i32:1" is 1.
    constexprs: argument -> value.
    options: further options of Triton's compiler, such as maxnreg or num_ctas.

    Raises ValueError or TypeError for an unknown arch or an argument that is missing or misnamed, CompilationFailed
    where the kernel does not compile, and TimeoutError after `timeout` seconds.
    """
    text, kernel_name = _source(kernel, name)
    types = {a: f"{t}:16" if t.startswith("*") and ":" not in t else t for a, t in signature.items()}
    options = {"num_warps": num_warps, "num_stages": num_stages, **options}
    constants = dict(constexprs or {})
    _check_arguments(text, kernel_name, types, constants)
    key = json.dumps([text, kernel_name, types, constants, arch, options], default=repr)
    if key not in _known:
        arguments = (text, kernel_name, types, constants, _capability(arch), options, timeout)
        (found,) = _request("kernel", text, arch, arguments, timeout)
        while len(_known) >= KEPT:
            del _known[next(iter(_known))]
        _known[key] = found
    return _known[key]


def compile_call(call: Call, *, arch: str = "sm_90", timeout: float = 120.0) -> list[Compiled]:
    """Compile each kernel that a Python call would launch, just as that launch would, and run none of them.

    call: of a function that launches kernels, with tensors on any device; what kernels would have written is left as it
    was. Types, constexprs, warps, stages and grid are those of the launch; a function that asks torch.cuda for its
    device's properties hears those of a GPU of `arch`: A100, A10, L40S, H200 or B200. Raises CompilationFailed as well
    where the function itself raises.
    """
    text, name = _source(call.function, None)
    arguments = (text, name, call.args, call.kwargs, _capability(arch), limits_of(arch).num_sms, timeout)
    return _request("call", text, arch, arguments, timeout)


def ask_compiler(kind: str, *arguments: Any, timeout: float) -> Any:
    """What function `kind` of the compiling process gives, see `labkit.compiled.child`."""
    return _compiler.request(kind, *arguments, timeout=timeout)


def _request(kind: str, text: str, arch: str, arguments: tuple, timeout: float) -> list[Compiled]:
    try:
        builds, printed = ask_compiler(kind, *arguments, timeout=timeout)
    except RuntimeError as error:
        raise CompilationFailed(str(error)) from None
    return [_report(build, arch, printed, text) for build in builds]


def _report(build: Build, arch: str, printed: str, text: str) -> Compiled:
    metadata = build.metadata
    return Compiled(
        kernel=build.kernel,
        arch=arch,
        signature={name: kind for name, kind in build.types.items() if kind != "constexpr"},
        constexprs=build.constants,
        grid=build.grid,
        num_warps=metadata["num_warps"],
        num_stages=metadata["num_stages"],
        num_ctas=metadata["num_ctas"],
        threads=threads_of(build.asm["ptx"]),
        resources=parse_ptxas(build.ptxas),
        shared_dynamic=metadata["shared"],
        tensor_memory=metadata.get("tmem_size") or 0,
        asm=build.asm,
        printed=printed,
        source=text,
    )


def _check_arguments(text: str, name: str, signature: dict[str, str], constexprs: dict[str, Any]) -> None:
    """Each argument of the kernel has a type, a value or a default, and no other is named."""
    found = [n for n in ast.walk(ast.parse(text)) if isinstance(n, ast.FunctionDef) and n.name == name]
    if not found:
        raise ValueError(f"name: the source defines no kernel `{name}`")
    arguments = [*found[-1].args.posonlyargs, *found[-1].args.args, *found[-1].args.kwonlyargs]
    names = [a.arg for a in arguments]
    optional = names[len(names) - len(found[-1].args.defaults) :]
    for given in (*signature, *constexprs):
        if given not in names:
            raise TypeError(f"`{name}` has no argument `{given}`; it has {', '.join(names)}")
    for argument in arguments:
        if argument.arg not in (*signature, *constexprs, *optional):
            constant = argument.annotation is not None and "constexpr" in ast.unparse(argument.annotation)
            missing = "constexprs: no value" if constant else "signature: no type"
            raise TypeError(f"{missing} for argument `{argument.arg}` of `{name}`")


def _source(function: Any, name: str | None) -> tuple[str, str]:
    if isinstance(function, str):
        if not name:
            raise TypeError("name: needed where the kernel is given as source text")
        return function, name
    plain = plain_function(function)
    if plain is None or (name and not is_kernel(function)):
        raise TypeError(f"expected a Triton kernel, a function or source text, got {type(function).__name__}")
    return standalone(function), plain.__name__


def _capability(arch: str) -> int:
    limits_of(arch)
    return int(arch.removeprefix("sm_"))
