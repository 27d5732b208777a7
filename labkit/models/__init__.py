"""Models of the camp: shapes of real ones, and tiny ones with random weights that are built in a second."""

from labkit.models.shapes import (
    LLAMA_2_7B,
    LLAMA_3_1_8B,
    QWEN3_0_6B,
    QWEN3_8_27B,
    QWEN3_8B,
    QWEN3_32B,
    SHAPES,
    ModelShape,
    RecurrentState,
)
from labkit.models.tiny import build_tiny, tiny_path

__all__ = [
    "LLAMA_2_7B",
    "LLAMA_3_1_8B",
    "QWEN3_0_6B",
    "QWEN3_8B",
    "QWEN3_8_27B",
    "QWEN3_32B",
    "SHAPES",
    "ModelShape",
    "RecurrentState",
    "build_tiny",
    "tiny_path",
]
