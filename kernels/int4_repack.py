"""Int4 weights, from the layout of an AutoAWQ checkpoint to one that kernels stream; done once, when a model loads.

A thread of the matrix instructions needs, of every 16 rows (outputs) and 16 columns (K) of the weights, rows r and
r + 8, columns 2t, 2t + 1, 2t + 8 and 2t + 9, where r = lane // 4 and t = lane % 4. Those 8 elements become one word
here, and the words of four neighbouring 16 x 16 squares, 64 of K, the 16 bytes that the thread loads at once. Marlin
(Frantar et al., arXiv:2408.11743) showed the idea.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.validate import require, require_ints, require_type

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the column of 8 that nibble i of a word of the checkpoint holds
K_BLOCK = 64
MAGIC = {torch.float16: 1024.0, torch.bfloat16: 128.0}  # see kernels.int4_parts
ONE_GROUP = 1 << 30  # the group size of weights that have one scale a row: above any K


@dataclass(frozen=True)
class Int4Weight:
    """A weight matrix [out_features, in_features] in 4 bits, as the kernels read it.

    words: [ceil(in_features / 64), ceil(out_features / 16), 128] int32: of 16 rows and 64 columns, word 16 r + 4 t + s
        has the elements of thread (r, t) of the s-th 16 columns. Nibble 2c + h + 4p is row r + 8h, column 2t + p + 8c.
    scale_zeros: [groups, 2, 8 * ceil(out_features / 16)] int32: of row 16 i + 8 h + r at [group, h, 8 i + r], the scale
        in the lower half, and in the upper MAGIC[dtype] plus the zero point, negated; both of `dtype`.
    group_size: columns that share a scale; in_features where each row has one scale.
    """

    words: torch.Tensor
    scale_zeros: torch.Tensor
    in_features: int
    out_features: int
    group_size: int
    dtype: torch.dtype

    @property
    def bytes(self) -> int:
        """Bytes of weights, scales and zero points together."""
        return sum(t.numel() * t.element_size() for t in (self.words, self.scale_zeros))


def unpack_awq(words: torch.Tensor) -> torch.Tensor:
    """[rows, columns / 8] int32 in AutoAWQ's order to [rows, columns] uint8."""
    codes = torch.empty(*words.shape, 8, dtype=torch.uint8, device=words.device)
    for nibble, column in enumerate(AWQ_ORDER):
        codes[..., column] = (words >> 4 * nibble & 15).to(torch.uint8)
    return codes.flatten(1)


def repack_awq(
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    *,
    group_size: int,
    dtype: torch.dtype | None = None,
) -> Int4Weight:
    """The weights of an AutoAWQ checkpoint (version "GEMM") for `kernels.int4_matmul`.

    qweight: [in_features, out_features / 8] int32. qzeros: [groups, out_features / 8] int32. scales: [groups,
        out_features], float16 or bfloat16. weight[n, k] = (code[k, n] - zero[k // group_size, n]) * scale[k //
        group_size, n].
    group_size: 32, 64 or 128, dividing in_features; -1 for one group.
    dtype: float16 or bfloat16, what the weights are dequantized to and x must have; None for that of scales.

    out_features are a multiple of 8, as the format has it; they are filled up to one of 16, and in_features to one of
    64, with weights of zero. Raises TypeError or ValueError, naming the argument.
    """
    dtype = scales.dtype if dtype is None else dtype
    require_type(dtype in MAGIC, f"dtype: expected float16 or bfloat16, got {dtype}")
    require_ints((torch.int32,), qweight=qweight, qzeros=qzeros)
    require(qweight.ndim == 2, f"qweight: expected [in_features, out_features / 8], got {list(qweight.shape)}")
    in_features, out_features = qweight.shape[0], 8 * qweight.shape[1]
    require(group_size in (32, 64, 128, -1), f"group_size: expected 32, 64, 128 or -1, got {group_size}")
    size = in_features if group_size == -1 else group_size
    require(
        in_features % size == 0 and in_features % 8 == 0,
        f"qweight: in_features ({in_features}) must be a multiple of group_size ({size}) and of 8",
    )
    groups = in_features // size
    for name, tensor, columns in (("qzeros", qzeros, out_features // 8), ("scales", scales, out_features)):
        require(tensor.shape == (groups, columns), f"{name}: expected [{groups}, {columns}], got {list(tensor.shape)}")
    require_type(scales.is_floating_point(), f"scales: expected float16 or bfloat16, got {scales.dtype}")
    words = _fragments(unpack_awq(qweight))
    scale_zeros = _scale_zeros(scales.to(dtype), unpack_awq(qzeros))
    return Int4Weight(words, scale_zeros, in_features, out_features, size, dtype)


def _fragments(codes: torch.Tensor) -> torch.Tensor:
    """[in_features, out_features] uint8 to Int4Weight.words."""
    k, n = codes.shape
    codes = torch.nn.functional.pad(codes, (0, -n % 16, 0, -k % K_BLOCK))
    # (64 of K, 16 of K, half, pair, column; 16 rows, half, row)
    squares = codes.view(-1, 4, 2, 4, 2, codes.shape[1] // 16, 2, 8)
    words = torch.zeros(squares.shape[0], squares.shape[5], 8, 4, 4, dtype=torch.int32, device=codes.device)
    for c in range(2):
        for h in range(2):
            for p in range(2):
                nibbles = squares[:, :, c, :, p, :, h, :].to(torch.int32)  # (64 of K, 16 of K, pair, 16 rows, row)
                words |= nibbles.permute(0, 3, 4, 2, 1) << 4 * (2 * c + h + 4 * p)
    return words.flatten(2)


def _scale_zeros(scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """[groups, out_features] scales and uint8 zero points to Int4Weight.scale_zeros. Rows that fill up have scale 0."""
    minus = (-MAGIC[scales.dtype] - zeros.float()).to(scales.dtype)
    lower, upper = (t.contiguous().view(torch.int16).to(torch.int32) for t in (scales, minus))
    words = upper << 16 | lower & 0xFFFF
    words = torch.nn.functional.pad(words, (0, -words.shape[1] % 16))
    return words.view(words.shape[0], -1, 2, 8).transpose(1, 2).reshape(words.shape[0], 2, -1)
