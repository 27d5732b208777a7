"""Machine code as text: instructions, their counts by family, and the source line that each came from.

The disassembler is nvdisasm, which comes with Triton; the lines are in the cubin, where ptxas puts them from the PTX's
`.loc` marks. After optimisation an instruction may be credited to a neighbour of the line that it serves.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

# Family -> first parts of SASS mnemonics; a "*" stands for any letters.
FAMILIES = {
    "mma": ("HMMA", "IMMA", "QMMA", "DMMA", "BMMA"),  # mma.sync, sm_80 onwards
    "wgmma": ("HGMMA", "QGMMA", "IGMMA", "BGMMA"),  # warpgroup MMA, sm_90
    "tcgen05": ("UTC*MMA",),  # tensor cores with tensor memory, sm_100
    "async_copy": ("LDGSTS",),  # cp.async
    "tma_load": ("UTMALDG", "UBLKCP"),
    "tma_store": ("UTMASTG", "UTMAREDG"),
    "barrier": ("BAR",),  # bar.sync and its kin: all warps of a block, or named groups of them
    "mbarrier": ("SYNCS",),  # barriers in shared memory, which TMA and tensor cores arrive at
    "local_load": ("LDL",),  # local memory: spilled registers, arrays with a computed index
    "local_store": ("STL",),
    "shared_load": ("LDS", "LDSM"),
    "shared_store": ("STS", "STSM"),
    "global_load": ("LDG",),
    "global_store": ("STG",),
    "special_function": ("MUFU",),  # exp2, reciprocal, square root, ...
}
PATTERNS = {f: re.compile("|".join(n.replace("*", "[A-Z]*") for n in names)) for f, names in FAMILIES.items()}

_FILE_LINE = re.compile(r'^\s*//## File "(?P<file>.*)", line (?P<line>\d+)')
_SASS = re.compile(r"^\s+/\*(?P<address>[0-9a-f]{4,})\*/\s+(?P<text>.+?)\s*;")
_LABEL = re.compile(r"^\s*(?P<text>[.$\w]+:)")
_PREDICATE = re.compile(r"^@!?U?P\w+\s+")
_PTX_FILE = re.compile(r'^\s*\.file\s+(?P<number>\d+)\s+"(?P<folder>[^"]*)"(?:\s+"(?P<name>[^"]*)")?')
_PTX_LOC = re.compile(r"^\s*\.loc\s+(?P<number>\d+)\s+(?P<line>\d+)")
_PTX_CALLER = re.compile(r"@\[ (?P<name>\S+):(?P<line>\d+):\d+")  # in the comment on a line of an inlined function
_PTX_NOISE = re.compile(r"^\s*(?:\.loc\b|\.file\b|//|$|\$L__tmp|\.section\b|\.b8|\.b32|\.b64)")


@dataclass(frozen=True)
class Line:
    """One line of PTX or SASS, and the source line that it came from; file "" and line 0 where that is not known."""

    text: str
    file: str = ""
    line: int = 0
    is_instruction: bool = True

    @property
    def mnemonic(self) -> str:
        """The instruction with its modifiers and without predicate and operands, such as LDG.E.128."""
        return _PREDICATE.sub("", self.text).split()[0] if self.is_instruction else ""


class DisassemblerFailed(RuntimeError):
    """nvdisasm could not be run, or refused the file."""


def disassemble(cubin: bytes) -> tuple[Line, ...]:
    """The instructions and labels of a cubin, with their source lines."""
    from triton import knobs

    tool = knobs.nvidia.nvdisasm.path
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        done = subprocess.run([tool, "-c", "-g", file.name], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DisassemblerFailed(f"{Path(tool).name} failed: {done.stderr.strip()}")
    return tuple(_sass_lines(done.stdout.splitlines()))


def _sass_lines(lines: Iterable[str]) -> Iterator[Line]:
    file, number = "", 0
    for line in lines:
        if mark := _FILE_LINE.match(line):
            file, number = mark["file"], int(mark["line"])
        elif found := _SASS.match(line):
            yield Line(found["text"], file, number)
        elif (label := _LABEL.match(line)) and label["text"].startswith(".L"):
            yield Line(label["text"], is_instruction=False)


def ptx_lines(ptx: str) -> tuple[Line, ...]:
    """The lines of a PTX text without its marks and debug sections, each with its source line.

    What comes from a function of Triton's own, such as tl.max, is credited to the line that calls it; a cubin does not
    keep who called.
    """
    body = ptx.partition(".section")[0].splitlines()
    files: dict[str, str] = {}
    found, file, number = [], "", 0
    for line in ptx.splitlines():
        if mark := _PTX_FILE.match(line):
            files[mark["number"]] = str(Path(mark["folder"], mark["name"])) if mark["name"] else mark["folder"]
    by_name = {Path(path).name: path for path in files.values()}
    for line in body:
        if mark := _PTX_LOC.match(line):
            file, number = files.get(mark["number"], ""), int(mark["line"])
            if callers := _PTX_CALLER.findall(line):
                file, number = by_name.get(callers[-1][0], callers[-1][0]), int(callers[-1][1])
        elif not _PTX_NOISE.match(line):
            code = line.strip()
            is_instruction = bool(number) and code.endswith(";") and not code.startswith(".")
            found.append(Line(code, file if is_instruction else "", number if is_instruction else 0, is_instruction))
    return tuple(found)


def count_mnemonics(lines: Iterable[Line]) -> Counter[str]:
    """How often each mnemonic stands in the code, modifiers included. NOPs, which only pad, are left out."""
    return Counter(line.mnemonic for line in lines if line.is_instruction and line.mnemonic != "NOP")


def count_families(mnemonics: Counter[str]) -> dict[str, int]:
    """How many instructions of each family of FAMILIES stand in the code; not how often they run."""
    return {
        family: sum(n for name, n in mnemonics.items() if pattern.fullmatch(name.partition(".")[0]))
        for family, pattern in PATTERNS.items()
    }
