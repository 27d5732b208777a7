"""Packed codes: nibble by nibble as the formats say, and equal to what the formats' own libraries make of them."""

import pytest
import torch
from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, quantize
from labkit.quant.packing import (
    AWQ_ORDER,
    from_awq,
    from_compressed_tensors,
    pack,
    to_awq,
    to_compressed_tensors,
    unpack,
)

WEIGHT = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
HALF = torch.float16


def test_nibbles_lie_where_each_format_says():
    codes = torch.arange(8)[None]
    assert pack(codes).item() & 0xFFFFFFFF == 0x76543210
    assert pack(codes, AWQ_ORDER).item() & 0xFFFFFFFF == 0x75316420


@pytest.mark.parametrize("order", [AWQ_ORDER, tuple(range(8))])
def test_what_is_packed_is_unpacked_alike(order):
    codes = torch.randint(0, 16, (33, 64), generator=torch.Generator().manual_seed(1), dtype=torch.uint8)
    codes[0] = 15  # all bits set: the sign of the int32
    assert torch.equal(unpack(pack(codes, order), order), codes)


@pytest.mark.parametrize("group_size", [PER_CHANNEL, 32, 64, 128])
@pytest.mark.parametrize("symmetric", [False, True])
def test_a_matrix_comes_back_from_both_formats(group_size, symmetric):
    made = quantize(WEIGHT, Scheme(4, group_size, symmetric, HALF))
    for back in (from_awq(to_awq(made)), from_compressed_tensors(to_compressed_tensors(made))):
        assert torch.equal(back.codes, made.codes) and torch.equal(back.zeros, made.zeros)
        assert torch.equal(back.dequantize(), made.dequantize()) and back.scheme.group_size == group_size


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_shapes_are_those_that_kernels_expect(symmetric):
    made = quantize(WEIGHT, Scheme(4, 64, symmetric, HALF))
    awq = {name: (list(t.shape), t.dtype) for name, t in to_awq(made).items()}
    assert awq == {
        "qweight": ([256, 12], torch.int32),
        "qzeros": ([4, 12], torch.int32),
        "scales": ([4, 96], HALF),
    }
    ct = {name: (list(t.shape), t.dtype) for name, t in to_compressed_tensors(made).items()}
    wanted = {
        "weight_packed": ([96, 32], torch.int32),
        "weight_scale": ([96, 4], HALF),
        "weight_shape": ([2], torch.int64),
    }
    assert ct == wanted | ({} if symmetric else {"weight_zero_point": ([12, 4], torch.int32)})
    assert all(t.is_contiguous() for t in (*to_awq(made).values(), *to_compressed_tensors(made).values()))


def test_the_packed_bits_are_those_of_the_compressed_tensors_library():
    made = quantize(WEIGHT, Scheme(4, 64, scale_dtype=HALF))
    ours = to_compressed_tensors(made)
    codes, zeros = made.codes.char() - 8, made.zeros.char() - 8
    assert torch.equal(ours["weight_packed"], pack_to_int32(codes, 4))
    assert torch.equal(ours["weight_zero_point"], pack_to_int32(zeros, 4, packed_dim=0))
    assert torch.equal(unpack_from_int32(ours["weight_packed"], 4, codes.shape), codes)


def test_what_a_format_cannot_hold_is_refused_with_the_reason():
    for scheme, reason in (
        (Scheme(3, 64, scale_dtype=HALF), "3 bits"),
        (Scheme(4, PER_TENSOR, scale_dtype=HALF), "at least one a row"),
        (Scheme(4, 64), "fit the scales that are stored"),
    ):
        for write in (to_awq, to_compressed_tensors):
            with pytest.raises(ValueError, match=reason):
                write(quantize(WEIGHT, scheme))
    with pytest.raises(ValueError, match=r"stores torch\.float16"):
        to_awq(quantize(WEIGHT, Scheme(4, 64, scale_dtype=torch.bfloat16)))
    with pytest.raises(ValueError, match=r"transposed, must be .* multiple of 8 columns"):
        to_awq(quantize(WEIGHT[:12], Scheme(4, 64, scale_dtype=HALF)))
    with pytest.raises(ValueError, match="from 0 to 15"):
        pack(torch.full((1, 8), 16))
    with pytest.raises(ValueError, match="words must be int32"):
        unpack(torch.zeros(1, 8))
