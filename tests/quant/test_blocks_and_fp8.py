"""GGUF-style blocks, bit for bit as llama.cpp's own package has them, and FP8 beside int8."""

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, quants

from labkit.quant.blocks import quantize_q4_0, quantize_q4_k
from labkit.quant.floats import dequantize_fp8, quantize_fp8
from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Scheme, round_trip

WEIGHT = torch.randn(48, 512, generator=torch.Generator().manual_seed(0)) * 0.02
EDGES = WEIGHT.clone()
EDGES[0], EDGES[1], EDGES[2], EDGES[3] = 0, 0.5, -0.5, EDGES[3].abs()


def lost(made, weight=WEIGHT):
    return (made - weight).square().mean().item()


def test_q4_0_has_the_bytes_of_the_gguf_package():
    made = quantize_q4_0(EDGES)
    wanted = quants.quantize(EDGES.numpy(), GGMLQuantizationType.Q4_0)
    assert np.array_equal(made.to_bytes().numpy(), wanted)
    assert np.array_equal(made.dequantize().numpy(), quants.dequantize(wanted, GGMLQuantizationType.Q4_0))


def test_the_gguf_package_reads_our_q4_k_as_we_do():
    made = quantize_q4_k(EDGES)
    written = made.to_bytes()
    assert written.shape == (48, 2 * 144), "4.5 bits a weight"
    read = quants.dequantize(written.numpy(), GGMLQuantizationType.Q4_K)
    assert np.array_equal(made.dequantize().numpy(), read)


def test_at_four_and_a_half_bits_a_weight_q4_k_loses_least():
    """RTN with a minimum and a scale for each 32 costs 4.6 bits; one of 64 costs 4.3."""
    k, zero = lost(quantize_q4_k(WEIGHT).dequantize()), lost(quantize_q4_0(WEIGHT).dequantize())
    assert k < 0.85 * lost(round_trip(WEIGHT, Scheme(4, 32))) and k < 0.75 * zero


def test_blocks_that_have_no_line_stay_what_they_are():
    made = quantize_q4_k(EDGES).dequantize()
    assert bool((made[0] == 0).all())
    torch.testing.assert_close(made[1:3], EDGES[1:3], rtol=1e-3, atol=0)


def test_a_smaller_super_block_fits_other_widths_and_no_gguf_file():
    made = quantize_q4_k(WEIGHT[:, :192], 192)
    assert lost(made.dequantize(), WEIGHT[:, :192]) < lost(round_trip(WEIGHT[:, :192], Scheme(4, 32)), WEIGHT[:, :192])
    with pytest.raises(ValueError, match="8 sub-blocks to a super-block, and here are 6"):
        made.to_bytes()
    with pytest.raises(ValueError, match=r"super_block 256 does not divide the columns of weight, \[48, 192\]"):
        quantize_q4_k(WEIGHT[:, :192])
    with pytest.raises(ValueError, match="super_block must be a multiple of 32"):
        quantize_q4_k(WEIGHT, 48)
    with pytest.raises(ValueError, match="32 does not divide"):
        quantize_q4_0(WEIGHT[:, :40])
    with pytest.raises(ValueError, match="not finite"):
        quantize_q4_0(WEIGHT / 0)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("group_size", [PER_TENSOR, PER_CHANNEL, 64])
def test_fp8_moves_each_number_by_half_a_step_of_its_mantissa(dtype, group_size):
    values, scales = quantize_fp8(WEIGHT, dtype, group_size)
    made = dequantize_fp8(values, scales, group_size)
    step = torch.finfo(dtype).eps / 2
    normal = WEIGHT.abs() > WEIGHT.abs().max() * torch.finfo(dtype).smallest_normal / torch.finfo(dtype).max * 2
    moved = ((made - WEIGHT).abs() / WEIGHT.abs())[normal]
    assert moved.max() <= step * 1.001 and moved.max() > step * 0.8
    assert values.dtype == dtype and values.shape == WEIGHT.shape and bool(torch.isfinite(made).all())


def test_fp8_loses_digits_without_a_scale():
    scaled = dequantize_fp8(*quantize_fp8(WEIGHT * 0.1))
    assert lost(scaled, WEIGHT * 0.1) < 0.5 * lost((WEIGHT * 0.1).to(torch.float8_e4m3fn).float(), WEIGHT * 0.1)


def test_of_eight_bits_evenly_spaced_ones_lose_least_on_such_weights():
    """Near-Gaussian rows spread over few binades: what an exponent spends, the mantissa lacks."""
    int8 = lost(round_trip(WEIGHT, Scheme(8)))
    e4m3, e5m2 = (lost(dequantize_fp8(*quantize_fp8(WEIGHT, d))) for d in (torch.float8_e4m3fn, torch.float8_e5m2))
    assert 4 * int8 < e4m3 and 3 * e4m3 < e5m2, (int8, e4m3, e5m2)


def test_fp8_refuses_what_does_not_fit():
    with pytest.raises(ValueError, match=r"dtype must be torch\.float8_e4m3fn"):
        quantize_fp8(WEIGHT, torch.float16)
    with pytest.raises(ValueError, match="not finite"):
        quantize_fp8(WEIGHT / 0)
    values, scales = quantize_fp8(torch.zeros(2, 4))
    assert bool((dequantize_fp8(values, scales) == 0).all())
