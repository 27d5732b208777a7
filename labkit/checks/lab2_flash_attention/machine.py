"""Registers, shared memory, occupancy, banks: arithmetic about the machine."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from labkit.checks.contract import Question, require

LAB = "lab2_flash_attention"

programs_per_sm = Question("programs_per_sm", LAB, "the tightest of four limits decides how many programs run at once")


@programs_per_sm.invariant("registers, rounded up for each thread")
def _(answer) -> None:
    cases = ((255, 4, 2), (128, 4, 4), (129, 4, 3), (32, 8, 8), (200, 8, 1), (150, 1, 12), (50, 4, 9))
    for registers, warps, want in cases:
        got = answer(registers, 0, warps)
        what = f"programs of {warps} warps with {registers} registers a thread"
        require(got == want, f"{got} {what}, {want} expected: a part holds whole warps")


@programs_per_sm.invariant("shared memory, with what the system takes")
def _(answer) -> None:
    for shared, want in ((233472 - 1024, 1), (115712, 2), (115713, 1), (49152, 4)):
        got = answer(32, shared, 4)
        require(
            got == want,
            f"{got} programs with {shared} bytes of shared memory, {want} expected: 1,024 bytes come on top",
        )


@programs_per_sm.invariant("warps and programs")
def _(answer) -> None:
    got = [answer(16, 0, warps) for warps in (1, 2, 4, 16)]
    require(
        got == [32, 32, 16, 4],
        f"{got} tiny programs of 1, 2, 4, 16 warps, [32, 32, 16, 4] expected: 64 warps, 32 programs",
    )


choose_config = Question("choose_config", LAB, "the configuration with the most reuse within the limits is found")


@dataclass(frozen=True)
class Report:
    """What a compiler says of one candidate."""

    registers: int
    spills: int
    shared_bytes: int


def candidate(block_m: int, num_warps: int = 4, block_n: int = 64, num_stages: int = 2) -> dict:
    """A configuration of the checks."""
    return {"block_m": block_m, "block_n": block_n, "num_warps": num_warps, "num_stages": num_stages}


class Compiler:
    """Gives prepared reports, and counts how often it was asked. None stands for a candidate that does not compile."""

    def __init__(self, *reports: tuple[int, int, int] | None):
        self.candidates = [candidate(2 ** (4 + i)) for i in range(len(reports))]
        self.reports = dict(zip((c["block_m"] for c in self.candidates), reports, strict=True))
        self.asked = 0

    def __call__(self, config: dict) -> Report:
        self.asked += 1
        found = self.reports[config["block_m"]]
        if found is None:
            raise RuntimeError("out of resource: shared memory")
        return Report(*found)


@choose_config.invariant("the largest tile that fits")
def _(answer) -> None:
    compiler = Compiler((64, 0, 8192), (128, 0, 16384), (168, 0, 32768), (255, 400, 65536))
    got = answer(compiler.candidates, compiler, 1)
    require(got["block_m"] == 64, f"block_m {got['block_m']} chosen, 64 expected: 128 spills 400 bytes")


@choose_config.invariant("a stated number of programs must fit")
def _(answer) -> None:
    compiler = Compiler((64, 0, 8192), (128, 0, 16384), (200, 0, 32768))
    got = answer(compiler.candidates, compiler, 3)
    require(
        got["block_m"] == 32, f"block_m {got['block_m']} chosen, 32 expected: with 200 registers only 2 programs fit"
    )


@choose_config.invariant("what does not compile is passed over, and each is compiled once")
def _(answer) -> None:
    compiler = Compiler(None, (100, 0, 9000), None)
    got = answer(compiler.candidates, compiler, 1)
    require(got["block_m"] == 32, f"block_m {got['block_m']} chosen, 32 expected: the others do not compile")
    require(compiler.asked <= 3, f"{compiler.asked} compilations for 3 candidates")


@choose_config.invariant("of equal tiles the one with more programs, then the first")
def _(answer) -> None:
    configs = [candidate(64, 8), candidate(64, 4), candidate(64, 4, 32), candidate(32, 4)]
    got = answer(configs, lambda c: Report(128 if c["block_m"] == 64 else 32, 0, 9000), 1)
    require(
        got == configs[1], f"{got} chosen: 8 warps fit 2 programs, 4 warps fit 4, and the first of equals was expected"
    )


@choose_config.invariant("no candidate within the limits is an error")
def _(answer) -> None:
    compiler = Compiler((255, 8, 9000), None)
    try:
        got = answer(compiler.candidates, compiler, 1)
    except ValueError:
        return
    require(False, f"one candidate spills, one does not compile, and the answer was {got}, not a ValueError")


count_conflicts = Question(
    "count_conflicts", LAB, "turns are counted by different words of one bank", ("labkit.bank_conflicts",)
)


@count_conflicts.invariant("rows, columns and broadcasts")
def _(answer) -> None:
    cases = {
        "a row of 32 words": ([4 * i for i in range(32)], 0),
        "a column of a 32 by 32 tile": ([128 * i for i in range(32)], 31),
        "all lanes the same word": ([64] * 32, 0),
        "every second word": ([8 * i for i in range(32)], 1),
        "the example of the docstring": ([0, 128, 128, 4], 1),
    }
    for name, (addresses, want) in cases.items():
        got = answer(addresses)
        require(got == want, f"{name}: {got} conflicts, {want} expected; lanes that read the same word share a turn")


@count_conflicts.invariant("padded rows")
def _(answer) -> None:
    got = answer([132 * i for i in range(32)])
    require(got == 0, f"a column of rows padded by one word: {got} conflicts, 0 expected")


swizzled_address = Question("swizzled_address", LAB, "groups trade places within their row, and none is lost")


def _tile(answer, vec: int, max_phase: int) -> dict[tuple[int, int], int]:
    return {(r, c): answer(r, c, vec, max_phase) for r, c in itertools.product(range(32), range(32))}


@swizzled_address.invariant("every element keeps a place of its own in its row")
def _(answer) -> None:
    for vec, max_phase in ((1, 1), (4, 8), (1, 32), (2, 16)):
        tile = _tile(answer, vec, max_phase)
        require(len(set(tile.values())) == 1024, f"vec {vec}, max_phase {max_phase}: two elements share an address")
        wrong = [at for at, address in tile.items() if address // 128 != at[0] or address % 4]
        require(not wrong, f"vec {vec}, max_phase {max_phase}: element {wrong[:1]} left its row")


@swizzled_address.invariant("the formula, with groups kept together")
def _(answer) -> None:
    for row, col, vec, max_phase, want in (
        (1, 0, 4, 8, 144),
        (0, 9, 4, 8, 36),
        (9, 5, 4, 8, 9 * 128 + 4),
        (3, 1, 1, 32, 392),
    ):
        got = answer(row, col, vec, max_phase)
        require(
            got == want, f"element ({row}, {col}), vec {vec}, max_phase {max_phase}: address {got}, {want} expected"
        )


@swizzled_address.invariant("a wider tile")
def _(answer) -> None:
    got, want = answer(2, 63, 8, 4, 64), 4 * (128 + (7 ^ 2) * 8 + 7)
    require(got == want, f"element (2, 63) of a tile of 64 columns, vec 8, max_phase 4: address {got}, {want} expected")


QUESTIONS = [programs_per_sm, choose_config, count_conflicts, swizzled_address]
