"""Four-bit codes, eight to an int32, as two families of checkpoints and their kernels lay them out.

AutoAWQ GEMM: qweight [in, out / 8], qzeros [in / group, out / 8], scales [in / group, out] fp16; eight outputs share an
int32, and its nibble i holds output AWQ_ORDER[i] of the eight, which spares a GPU kernel some shuffling when it turns
pairs of nibbles into fp16. compressed-tensors, pack-quantized: weight_packed [out, in / 8] in natural order,
weight_scale [out, in / group], weight_zero_point [out / 8, in / group] packed along the outputs, weight_shape [2].
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Quantized, Scheme

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
NATURAL_ORDER = (0, 1, 2, 3, 4, 5, 6, 7)


def pack(codes: torch.Tensor, order: tuple[int, ...] = NATURAL_ORDER, name: str = "codes") -> torch.Tensor:
    """Codes 0 to 15 [rows, columns] in int32 [rows, columns / 8]; nibble i, from the low end, is column order[i] of 8.

    ValueError, which calls the codes `name`, for columns that are no multiple of 8 and for codes out of range.
    """
    if codes.dim() != 2 or codes.shape[1] % 8:
        raise ValueError(f"{name} must be [rows, columns] with a multiple of 8 columns, and is {list(codes.shape)}")
    if codes.numel() and (int(codes.min()) < 0 or int(codes.max()) > 15):
        raise ValueError(f"{name} must lie from 0 to 15, to fit four bits, and reach {codes.min()} to {codes.max()}")
    eights = codes.long().reshape(codes.shape[0], -1, 8)[..., list(order)]
    words = (eights << (4 * torch.arange(8, device=codes.device))).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)  # the highest nibble sets the sign


def unpack(words: torch.Tensor, order: tuple[int, ...] = NATURAL_ORDER) -> torch.Tensor:
    """The codes, uint8 [rows, 8 * words], that `pack` put into int32 [rows, words]."""
    if words.dim() != 2 or words.dtype != torch.int32:
        raise ValueError(f"words must be int32 [rows, words], and is {words.dtype} {list(words.shape)}")
    # A shift to the right copies the sign into the high bits; the mask takes that away again.
    nibbles = (words[..., None] >> (4 * torch.arange(8, device=words.device, dtype=torch.int32))) & 15
    eights = torch.empty_like(nibbles)
    eights[..., list(order)] = nibbles
    return eights.reshape(words.shape[0], -1).to(torch.uint8)


def to_awq(quantized: Quantized) -> dict[str, torch.Tensor]:
    """qweight, qzeros and scales of one linear in the AutoAWQ GEMM format.

    ValueError for what the format cannot hold: other than 4 bits, one scale for the whole tensor, scales that are not
    fp16 (rounded after the codes were chosen, they would no longer fit them), outputs that are no multiple of 8.
    """
    _check(quantized, (torch.float16,))
    return {
        "qweight": pack(quantized.codes.T, AWQ_ORDER, "quantized.codes, transposed,"),
        "qzeros": pack(quantized.zeros.T, AWQ_ORDER, "quantized.zeros, transposed,"),
        "scales": quantized.scales.T.contiguous(),
    }


def from_awq(tensors: Mapping[str, torch.Tensor]) -> Quantized:
    """The quantized matrix in qweight, qzeros and scales of the AutoAWQ GEMM format. Asymmetric, whatever its zeros."""
    codes = unpack(tensors["qweight"], AWQ_ORDER).T.contiguous()
    zeros = unpack(tensors["qzeros"], AWQ_ORDER).T.contiguous()
    return Quantized(codes, tensors["scales"].T.contiguous(), zeros, _scheme(codes, tensors["scales"].T, False))


def to_compressed_tensors(quantized: Quantized) -> dict[str, torch.Tensor]:
    """Tensors of one linear in the pack-quantized format; a symmetric one has no zero points.

    The library counts codes from -8 to 7 and adds 8 to pack them: what is stored is our unsigned codes. ValueError as
    in `to_awq`; scales may also be bf16.
    """
    _check(quantized, (torch.float16, torch.bfloat16))
    made = {
        "weight_packed": pack(quantized.codes, name="quantized.codes"),
        "weight_scale": quantized.scales.contiguous(),
        "weight_shape": torch.tensor(quantized.codes.shape),
    }
    if not quantized.scheme.symmetric:
        made["weight_zero_point"] = pack(quantized.zeros.T, name="quantized.zeros, transposed,").T.contiguous()
    return made


def from_compressed_tensors(tensors: Mapping[str, torch.Tensor]) -> Quantized:
    """The quantized matrix in the tensors that `to_compressed_tensors` wrote."""
    codes, scales = unpack(tensors["weight_packed"]), tensors["weight_scale"]
    symmetric = "weight_zero_point" not in tensors
    zeros = torch.full(scales.shape, 8, dtype=torch.uint8, device=codes.device)
    if not symmetric:
        zeros = unpack(tensors["weight_zero_point"].T.contiguous()).T.contiguous()
    return Quantized(codes, scales, zeros, _scheme(codes, scales, symmetric))


def _scheme(codes: torch.Tensor, scales: torch.Tensor, symmetric: bool) -> Scheme:
    """What a checkpoint's shapes say. codes: [out, in]; scales: [out, groups]."""
    size = PER_CHANNEL if scales.shape[1] == 1 else codes.shape[1] // scales.shape[1]
    return Scheme(4, size, symmetric, scales.dtype)


def _check(quantized: Quantized, scale_dtypes: tuple[torch.dtype, ...]) -> None:
    if quantized.scheme.bits != 4:
        raise ValueError(f"quantized has {quantized.scheme.bits} bits: this format is written with 4")
    if quantized.scheme.group_size == PER_TENSOR:
        raise ValueError("quantized has one scale for the whole tensor: this format has at least one a row")
    if quantized.scales.dtype not in scale_dtypes:
        raise ValueError(
            f"quantized has scales of {quantized.scales.dtype}, and this format stores {scale_dtypes[0]}: quantize "
            f"with Scheme(scale_dtype={scale_dtypes[0]}), so that the codes fit the scales that are stored"
        )
