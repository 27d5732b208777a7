"""Bytes of a matrix in five formats, everything counted."""

from __future__ import annotations

from labkit.checks.contract import Failed, Question, require
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED

stored_bytes = Question("stored_bytes", LAB, "codes, scales, zeros and minima are all counted", SHIPPED)


def expected(outputs: int, inputs: int, fmt: str, group_size: int = 128) -> int:
    """The oracle, a row at a time in bytes; outputs of awq are a multiple of 8."""
    weights, size = outputs * inputs, inputs if group_size == -1 else group_size
    awq_groups = outputs * (inputs // size)
    return {
        "fp16": 2 * weights,
        "fp8": weights + 4 * outputs,
        "awq": weights // 2 + 2 * awq_groups + awq_groups // 2,
        "q4_0": weights // 32 * 18,
        "q4_k": weights // 256 * 144,
    }[fmt]


LOOK_AT = {
    "fp16": "two bytes a weight",
    "fp8": "a byte a weight, and an fp32 scale for each output",
    "awq": "half a byte a weight; for each output and group an fp16 scale and a zero of 4 bits",
    "q4_0": "18 bytes a block of 32",
    "q4_k": "144 bytes a super-block of 256: two fp16, and 6 + 6 bits for each 32",
}


def _agrees(answer, *case) -> None:
    got, want = answer(*case), expected(*case)
    require(got == want, f"{case[2]}, {case[0]} x {case[1]}: {got} bytes, {want} expected: {LOOK_AT[case[2]]}")
    require(isinstance(got, int), f"{case[2]}: {got!r} is a {type(got).__name__}, and bytes are an int")


@stored_bytes.invariant("fp16 and FP8")
def _(answer) -> None:
    for fmt in ("fp16", "fp8"):
        _agrees(answer, 64, 100, fmt)
        _agrees(answer, 1024, 4096, fmt)


@stored_bytes.invariant("AWQ at several group sizes", share=2)
def _(answer) -> None:
    for group in (128, 64, 32, -1):
        _agrees(answer, 512, 1024, "awq", group)
        _agrees(answer, 8, 384, "awq", group)


@stored_bytes.invariant("GGUF's blocks", share=2)
def _(answer) -> None:
    for outputs, inputs in ((1, 256), (64, 2048), (3, 768)):
        for fmt in ("q4_0", "q4_k"):
            _agrees(answer, outputs, inputs, fmt)


@stored_bytes.invariant("what does not divide, and an unknown format, are refused by name")
def _(answer) -> None:
    cases = (
        (8, 576, "awq", 128, "576"),
        (8, 576, "q4_k", 128, "576"),
        (8, 48, "q4_0", 128, "48"),
        (8, 64, "int7", 64, "int7"),
    )
    for outputs, inputs, fmt, group, word in cases:
        try:
            answer(outputs, inputs, fmt, group)
        except ValueError as error:
            require(word in str(error), f"the message must name {word}: {error}")
            continue
        raise Failed(f"{fmt} with {inputs} inputs (group_size {group}) must raise ValueError, naming {word}")


QUESTIONS = [stored_bytes]
