"""Public checks of lab 3, int4 quantization."""

from labkit.checks.lab3_int4_quantization import (
    adapting,
    caching,
    calibrating,
    clamping,
    columns,
    exporting,
    formats,
    grids,
    matmul,
    observing,
    packing,
    propagating,
    scaling,
)

QUESTIONS = [
    *grids.QUESTIONS,
    *observing.QUESTIONS,
    *clamping.QUESTIONS,
    *calibrating.QUESTIONS,
    *scaling.QUESTIONS,
    *columns.QUESTIONS,
    *packing.QUESTIONS,
    *matmul.QUESTIONS,
    *exporting.QUESTIONS,
    *propagating.QUESTIONS,
    *caching.QUESTIONS,
    *formats.QUESTIONS,
    *adapting.QUESTIONS,
]
