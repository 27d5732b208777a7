"""Quantization by hand: grids of few bits, observers of ranges, and where to cut outliers off."""

from labkit.quant.clip import clamp_sigmas, output_error, search_clip
from labkit.quant.grid import PER_CHANNEL, PER_TENSOR, Quantized, Scheme, quantize, round_trip
from labkit.quant.observers import MinMaxObserver

__all__ = [
    "PER_CHANNEL",
    "PER_TENSOR",
    "MinMaxObserver",
    "Quantized",
    "Scheme",
    "clamp_sigmas",
    "output_error",
    "quantize",
    "round_trip",
    "search_clip",
]
