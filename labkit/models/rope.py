"""How rotary embeddings are stretched to longer contexts."""

from __future__ import annotations

import math
from typing import Any

import torch


def llama3(frequency: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1's stretch: long waves slowed by `factor`, short ones kept, a ramp between (arXiv 2407.21783)."""
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    wavelength = 2 * math.pi / frequency
    turns = scaling["original_max_position_embeddings"] / wavelength
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequency * (kept + (1 - kept) / scaling["factor"])
