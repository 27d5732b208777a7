"""Quantization by hand: grids of few bits, where to cut outliers off, AWQ, GPTQ, and checkpoints that vLLM serves."""

from labkit.quant.awq import prepare_awq, scale_site, search_scales
from labkit.quant.blocks import quantize_q4_0, quantize_q4_k
from labkit.quant.checkpoints import dequantize_into, read_quantized, write_awq, write_compressed_tensors
from labkit.quant.clip import clamp_sigmas, output_error, search_clip
from labkit.quant.floats import dequantize_fp8, quantize_fp8
from labkit.quant.gptq import gptq_weight, quantize_gptq
from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Quantized, Scheme, quantize, round_trip
from labkit.quant.inputs import Inputs, linears_of, observe_inputs
from labkit.quant.observers import MinMaxObserver
from labkit.quant.packing import from_awq, from_compressed_tensors, to_awq, to_compressed_tensors
from labkit.quant.rtn import quantize_rtn

__all__ = [
    "PER_CHANNEL",
    "PER_TENSOR",
    "Inputs",
    "MinMaxObserver",
    "Quantized",
    "Scheme",
    "clamp_sigmas",
    "dequantize_fp8",
    "dequantize_into",
    "from_awq",
    "from_compressed_tensors",
    "gptq_weight",
    "linears_of",
    "observe_inputs",
    "output_error",
    "prepare_awq",
    "quantize",
    "quantize_fp8",
    "quantize_gptq",
    "quantize_q4_0",
    "quantize_q4_k",
    "quantize_rtn",
    "read_quantized",
    "round_trip",
    "scale_site",
    "search_clip",
    "search_scales",
    "to_awq",
    "to_compressed_tensors",
    "write_awq",
    "write_compressed_tensors",
]
