"""What `labkit inspect` prints."""

from __future__ import annotations

from typing import Any

from labkit.compiled.arch import limits_of
from labkit.compiled.calls import compile_call
from labkit.compiled.examples import Example
from labkit.compiled.report import Compiled

STAGES = ("ttir", "ttgir", "llir", "ptx", "sass")


def check_stage(stage: str | None) -> None:
    """ValueError for a stage that there is not."""
    if stage is not None and stage not in STAGES:
        raise ValueError(f"no stage {stage!r}; there are: {', '.join(STAGES)}")


def inspect_kernels(examples: tuple[Example, ...], arch: str) -> list[tuple[Example, Compiled]]:
    """Compile each kernel that the examples launch, each once. ValueError for an unknown arch; CompilationFailed."""
    limits_of(arch)
    for example in examples:
        if example.archs and arch not in example.archs:
            raise ValueError(f"{example.name} is for {' and '.join(example.archs)}, not {arch}")
    return [(example, made) for example in examples for made in compile_call(example.call(), arch=arch)]


def as_data(example: Example, made: Compiled) -> dict[str, Any]:
    """A compiled kernel as plain data for JSON."""
    occupancy = made.occupancy
    return {
        "example": example.name,
        "case": example.case,
        "kernel": made.kernel,
        "arch": made.arch,
        "grid": made.grid,
        "threads": made.threads,
        "num_warps": made.num_warps,
        "num_stages": made.num_stages,
        "num_ctas": made.num_ctas,
        "registers": made.registers,
        "spill_store_bytes": made.resources.spill_stores,
        "spill_load_bytes": made.resources.spill_loads,
        "stack_bytes": made.resources.stack,
        "shared_static_bytes": made.resources.shared_static,
        "shared_dynamic_bytes": made.shared_dynamic,
        "tensor_memory_columns": made.tensor_memory,
        "occupancy": {
            "blocks": occupancy.blocks,
            "warps": occupancy.warps,
            "max_warps": occupancy.max_warps,
            "percent": occupancy.percent,
            "limited_by": occupancy.limited_by,
        },
        "instructions": made.instructions,
        "layouts": made.layouts,
        "signature": made.signature,
        "constexprs": made.constexprs,
    }


def as_text(example: Example, made: Compiled) -> str:
    """A compiled kernel as a paragraph of text."""
    used, grid = made.resources, " x ".join(map(str, made.grid or ()))
    instructions = [f"{n} {family}" for family, n in made.instructions.items() if n]
    lines = {
        "called as": f"{example.name}: {example.case}",
        "launch": f"grid {grid}, {made.threads} threads, {made.num_stages} stages",
        "registers": f"{made.registers} a thread",
        "spills": f"{used.spill_stores} bytes stored, {used.spill_loads} loaded; stack {used.stack} bytes",
        "shared memory": f"{made.shared:,} bytes ({used.shared_static} static, {made.shared_dynamic:,} dynamic)",
        "occupancy": str(made.occupancy),
        "instructions": ", ".join(instructions),
        "constexprs": ", ".join(f"{name}={value}" for name, value in made.constexprs.items()),
    }
    if made.tensor_memory:
        lines["tensor memory"] = f"{made.tensor_memory} of 512 columns"
    body = [f"  {name:<15}{text}" for name, text in lines.items()]
    return "\n".join([f"{made.kernel} on {made.arch}", *body, *(f"  {n:<15}{t}" for n, t in made.layouts.items())])


def stage_text(made: Compiled, stage: str) -> str:
    """One stage of the compilation as text; PTX and SASS with the source line beside."""
    return made.listing(stage) if stage in ("ptx", "sass") else made.asm[stage]
