"""Kernels compiled for sm_80, sm_86, sm_89, sm_90 or sm_100 on a machine with no GPU, and what became of them.

    made = compile_kernel(softmax_kernel, {"x_ptr": "*fp16", "n": "i32"}, {"BLOCK": 1024}, arch="sm_90")
    made.registers, made.spills, made.shared, made.occupancy, made.instructions["wgmma"]
    print(made.listing("sass"))

    for made in compile_call(Call(paged_attention, (q, k_cache, v_cache, block_table, seq_lens))): ...

A live kernel of a machine without a GPU is interpreted, so its source is compiled in a process of its own: the first
time that takes a few seconds, then about one a kernel. Registers, stack and spills are the assembler's own figures.
"""

from labkit.compiled.arch import ARCHITECTURES, Limits, Occupancy, occupancy
from labkit.compiled.calls import CompilationFailed, compile_call, compile_kernel
from labkit.compiled.report import Compiled, Resources
from labkit.compiled.sass import FAMILIES, Line

__all__ = [
    "ARCHITECTURES",
    "FAMILIES",
    "CompilationFailed",
    "Compiled",
    "Limits",
    "Line",
    "Occupancy",
    "Resources",
    "compile_call",
    "compile_kernel",
    "occupancy",
]
