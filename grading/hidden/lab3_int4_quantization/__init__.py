"""Hidden checks of lab 3. They see values only; each module registers its own."""

from grading.hidden.lab3_int4_quantization import caches, calibrated, packed, rounding

__all__ = ["caches", "calibrated", "packed", "rounding"]
