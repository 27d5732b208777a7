"""Four-bit codes in int32 words: packing them, and reading them back without the three planted faults."""

from __future__ import annotations

import torch

from labkit import device
from labkit.checks.compare import equal
from labkit.checks.contract import Failed, Question, require

LAB = "lab3_int4_quantization"
SHIPPED = ("labkit.quant", "kernels")
ORDER = (0, 2, 4, 6, 1, 3, 5, 7)

pack_awq = Question("pack_awq", LAB, "each code stands in its nibble, also the one that sets the sign", SHIPPED)
fixed_dequantize = Question(
    "fixed_dequantize", LAB, "codes are unsigned, in their columns, and of their group", SHIPPED
)


def packed(codes: torch.Tensor) -> torch.Tensor:
    """The oracle: int32 [rows, columns / 8] of codes [rows, columns], made byte by byte."""
    nibbles = codes.to(torch.uint8).reshape(codes.shape[0], -1, 8)[..., list(ORDER)]
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4  # (rows, words, 4): the lower nibble first, little end first
    return pairs.contiguous().view(torch.int32).squeeze(-1)


def random_codes(rows: int, columns: int, seed: int, top: int = 16) -> torch.Tensor:
    """Codes below `top`, uint8, on the device."""
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, top, (rows, columns), generator=g, dtype=torch.uint8).to(device.name())


def awq_tensors(rows: int, columns: int, group: int, seed: int) -> tuple[torch.Tensor, ...]:
    """(qweight, qzeros, scales) on the device, and the weights that they stand for, fp64 on the CPU."""
    g = torch.Generator().manual_seed(seed)
    codes, zeros = random_codes(rows, columns, seed), random_codes(rows // group, columns, seed + 1)
    scales = (0.01 * (0.5 + torch.rand(rows // group, columns, generator=g))).half().to(device.name())
    zero, scale = (t.cpu().double().repeat_interleave(group, 0) for t in (zeros, scales))
    return packed(codes), packed(zeros), scales, (codes.cpu().double() - zero) * scale


def same_words(got: object, want: torch.Tensor, what: str, look_at: str = "") -> None:
    """`equal`, but a word that differs is shown in hexadecimal: a digit is a nibble."""
    prefix = f"{look_at}: " if look_at else ""
    if isinstance(got, torch.Tensor) and (got.shape, got.dtype) == (want.shape, torch.int32):
        mine, words = got.cpu(), want.cpu()
        wrong = mine != words
        if wrong.any():
            at = tuple(wrong.nonzero()[0].tolist())
            shown = [f"0x{int(t[at]) % 2**32:08x}" for t in (mine, words)]
            raise Failed(
                f"{prefix}{what}{list(at)} is {shown[0]}, {shown[1]} was expected; {int(wrong.sum())} of"
                f" {wrong.numel()} words are wrong"
            )
    equal(got, want, what)


@pack_awq.invariant("the eight of the example")
def _(answer) -> None:
    got = answer(torch.arange(8, dtype=torch.uint8, device=device.name())[None])
    want = torch.tensor([[0x75316420]], dtype=torch.int32)
    same_words(got, want, "the word of the codes 0 to 7, words", "is nibble i the code AWQ_ORDER[i] of the eight?")


@pack_awq.invariant("random codes below 8, several words a row")
def _(answer) -> None:
    for rows, columns in ((1, 8), (5, 64), (3, 24), (7, 8)):
        codes = random_codes(rows, columns, rows, top=8)
        look_at = f"codes of [{rows}, {columns}]: is nibble i the code AWQ_ORDER[i] of its eight?"
        same_words(answer(codes), packed(codes), "words", look_at)


@pack_awq.invariant("codes of 8 and more in the highest nibble")
def _(answer) -> None:
    for seed in (1, 2):
        codes = random_codes(4, 32, seed, top=8)
        codes[:, 7::8] += 8  # the last of eight columns lies in the highest nibble
        same_words(answer(codes), packed(codes), "words", "the highest nibble is 8 or more, so the int32 is negative")


@pack_awq.invariant("a transposed view, and no rows at all")
def _(answer) -> None:
    codes = random_codes(16, 6, 5).T
    same_words(answer(codes), packed(codes.contiguous()), "words of a transposed view", "codes need not be contiguous")
    equal(answer(codes[:0]), torch.empty(0, 2, dtype=torch.int32), "words of no rows")


@pack_awq.invariant("what does not fit is refused by name")
def _(answer) -> None:
    bad = random_codes(2, 16, 6)
    bad[1, 3] = 16
    for codes, word, what in ((random_codes(2, 12, 7), "column", "12 columns"), (bad, "code", "a code of 16")):
        try:
            answer(codes)
        except ValueError as error:
            require(word in str(error).lower(), f"the message about {what} must name the {word}s: {error}")
            continue
        raise Failed(f"{what} must raise ValueError: a ninth bit would change its neighbour")


def _reads(answer, tensors: tuple[torch.Tensor, ...], group: int, look_at: str) -> None:
    equal(answer(*tensors[:3], group), tensors[3].float(), "weights", look_at)


def _one_group(codes: torch.Tensor) -> tuple[torch.Tensor, ...]:
    columns = codes.shape[1]
    zeros = torch.zeros(1, columns, dtype=torch.uint8, device=codes.device)
    scales = torch.ones(1, columns, dtype=torch.float16, device=codes.device)
    return packed(codes), packed(zeros), scales, codes.cpu().float()


@fixed_dequantize.invariant("codes of 8 and more are positive")
def _(answer) -> None:
    for code in (8, 15):
        codes = torch.full((4, 16), code, dtype=torch.uint8, device=device.name())
        look_at = f"every code is {code}, every zero 0: does a shift to the right copy the sign?"
        _reads(answer, _one_group(codes), 4, look_at)


@fixed_dequantize.invariant("each code comes back in its column")
def _(answer) -> None:
    codes = torch.arange(8, dtype=torch.uint8, device=device.name()).repeat(3, 2)
    look_at = "column c holds code c % 8: does each nibble go where the order says, or is it taken from there?"
    _reads(answer, _one_group(codes), 3, look_at)


@fixed_dequantize.invariant("the rows next to a group's border have their own scale and zero")
def _(answer) -> None:
    for group, groups in ((4, 3), (32, 2)):
        codes = torch.full((group * groups, 8), 5, dtype=torch.uint8, device=device.name())
        zeros = torch.arange(groups, dtype=torch.uint8, device=codes.device)[:, None].repeat(1, 8)
        scales = (2.0 ** -torch.arange(groups, device=codes.device))[:, None].repeat(1, 8).half()
        zero, scale = (t.cpu().float().repeat_interleave(group, 0) for t in (zeros, scales))
        tensors = packed(codes), packed(zeros), scales, (5 - zero) * scale
        _reads(answer, tensors, group, f"every code is 5, groups of {group}: of which group is the row at the border?")


@fixed_dequantize.invariant("random weights, zeros of 8 and more among them")
def _(answer) -> None:
    for rows, columns, group in ((64, 40, 32), (6, 8, 6), (256, 16, 128)):
        tensors = awq_tensors(rows, columns, group, rows)
        look_at = f"[{rows}, {columns}] in groups of {group}: zeros are packed as codes are"
        _reads(answer, tensors, group, look_at)


QUESTIONS = [pack_awq, fixed_dequantize]
