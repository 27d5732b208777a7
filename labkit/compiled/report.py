"""What became of one compiled kernel: resources, occupancy, instructions, layouts and texts."""

from __future__ import annotations

import functools
import linecache
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from labkit.compiled import arch as architecture
from labkit.compiled.sass import Line, count_families, count_mnemonics, disassemble, ptx_lines
from labkit.source import STANDALONE

_USED = re.compile(r"Used (?P<registers>\d+) registers")
_SPILLS = re.compile(r"(?P<stack>\d+) bytes stack frame, (?P<stored>\d+) bytes spill stores, (?P<loaded>\d+) bytes")
_SHARED = re.compile(r"(?P<bytes>\d+) bytes smem")
_LAYOUT = re.compile(r"^(?P<name>#(?!loc)\w+) = (?P<text>#tt\w+\..*)$", re.MULTILINE)
_REQNTID = re.compile(r"\.reqntid (?P<threads>[\d, ]+)")


@dataclass(frozen=True)
class Resources:
    """What the assembler (ptxas -v) reports. All but registers in bytes.

    registers: of a thread. stack: local memory of a thread. spill_stores, spill_loads: written and read by a thread
    where registers did not suffice, each spill instruction counted once. shared_static: fixed in the code.
    """

    registers: int
    stack: int
    spill_stores: int
    spill_loads: int
    shared_static: int


def parse_ptxas(log: str) -> Resources:
    """Read ptxas's report of a kernel. ValueError if it is none."""
    used, spills, shared = _USED.search(log), _SPILLS.search(log), _SHARED.search(log)
    if not used or not spills:
        raise ValueError(f"ptxas did not report what the kernel uses: {log.strip() or '(nothing)'}")
    return Resources(
        int(used["registers"]), int(spills["stack"]), int(spills["stored"]), int(spills["loaded"]),
        int(shared["bytes"]) if shared else 0,
    )  # fmt: skip


@dataclass(frozen=True)
class Compiled:
    """A kernel as compiled for one architecture.

    signature: argument -> Triton type, ":16" where known to be divisible by 16. constexprs: written out. grid: of the
    launch that was compiled, None if it was compiled by its signature. threads: of a block, all warps of a
    warp-specialised kernel included. shared_dynamic: bytes of shared memory asked for at launch, which is where Triton
    puts all of its own. tensor_memory: columns, on sm_100. printed: what tl.static_print said. source: the module that
    was compiled, which file "<standalone>" stands for.
    """

    kernel: str
    arch: str
    signature: dict[str, str]
    constexprs: dict[str, str]
    grid: tuple[int, ...] | None
    num_warps: int
    num_stages: int
    num_ctas: int
    threads: int
    resources: Resources
    shared_dynamic: int
    tensor_memory: int
    asm: dict[str, Any] = field(repr=False)
    printed: str = field(default="", repr=False)
    source: str = field(default="", repr=False)

    @property
    def registers(self) -> int:
        """Registers of a thread."""
        return self.resources.registers

    @property
    def spills(self) -> int:
        """Bytes that a thread stores and loads because its registers did not suffice."""
        return self.resources.spill_stores + self.resources.spill_loads

    @property
    def shared(self) -> int:
        """Bytes of shared memory of a block, static and dynamic, without what the system reserves."""
        return self.resources.shared_static + self.shared_dynamic

    @property
    def occupancy(self) -> architecture.Occupancy:
        """How many warps an SM holds at once, and what limits it."""
        return architecture.occupancy(self.arch, threads=self.threads, registers=self.registers, shared=self.shared)

    @property
    def ptx(self) -> str:
        """The PTX text."""
        return self.asm["ptx"]

    @property
    def ttgir(self) -> str:
        """Triton's GPU IR, where layouts have been chosen."""
        return self.asm["ttgir"]

    @property
    def layouts(self) -> dict[str, str]:
        """Name -> text of the layouts in the TTGIR: how tiles are spread over threads and placed in shared memory."""
        return {found["name"]: found["text"] for found in _LAYOUT.finditer(self.ttgir)}

    @functools.cached_property
    def sass(self) -> tuple[Line, ...]:
        """The machine code with the source line of each instruction."""
        return disassemble(self.asm["cubin"])

    @functools.cached_property
    def mnemonics(self) -> Counter[str]:
        """How often each SASS mnemonic stands in the code, such as HMMA.16816.F32."""
        return count_mnemonics(self.sass)

    @functools.cached_property
    def instructions(self) -> dict[str, int]:
        """Instructions in the code by family (see FAMILIES): mma, wgmma, tcgen05, async_copy, tma_load, barrier, ..."""
        return count_families(self.mnemonics)

    def listing(self, stage: str = "sass") -> str:
        """ "sass" or "ptx" with the source line beside each instruction, written where it changes."""
        if stage not in ("sass", "ptx"):
            raise ValueError(f'stage: "sass" or "ptx", not {stage!r}; the others are in `asm`')
        lines = self.sass if stage == "sass" else ptx_lines(self.ptx)
        return "\n".join(self._beside(lines))

    def _beside(self, lines: tuple[Line, ...]) -> Iterator[str]:
        before = ("", 0)
        for line in lines:
            here = (line.file, line.line)
            text = f"    {line.text}" if line.is_instruction else line.text
            if line.is_instruction and line.line and here != before:
                text, before = f"{text:<72}  {self._where(*here)}", here
            yield text

    def _where(self, file: str, line: int) -> str:
        own = file.endswith(STANDALONE)
        lines = self.source.splitlines() if own else linecache.getlines(file)
        text = lines[line - 1].strip() if 0 < line <= len(lines) else ""
        return text if own else f"{Path(file).name}:{line}: {text}"

    def save(self, folder: Path | str) -> list[Path]:
        """Write every stage to `folder`: <kernel>.<arch>.ttir, .ttgir, .llir, .ptx, .cubin, and .sass with source."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        texts = {**self.asm, "sass": self.listing("sass") + "\n"}
        paths = []
        for stage, content in texts.items():
            paths.append(folder / f"{self.kernel}.{self.arch}.{stage}")
            paths[-1].write_bytes(content if isinstance(content, bytes) else content.encode())
        return paths


def threads_of(ptx: str) -> int:
    """Threads of a block: the product of the PTX's .reqntid."""
    found = _REQNTID.search(ptx)
    if not found:
        raise ValueError("the PTX has no .reqntid")
    product = 1
    for part in found["threads"].split(","):
        product *= int(part)
    return product
