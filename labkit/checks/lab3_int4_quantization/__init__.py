"""Public checks of lab 3, int4 quantization."""

from labkit.checks.lab3_int4_quantization import calibrating, clamping, columns, grids, observing, scaling

QUESTIONS = [
    *grids.QUESTIONS,
    *observing.QUESTIONS,
    *clamping.QUESTIONS,
    *calibrating.QUESTIONS,
    *scaling.QUESTIONS,
    *columns.QUESTIONS,
]
