"""Models of the camp: shapes of real ones, tiny random ones, a small trained one that ships, and SmolLM2."""

from labkit.models.arithmetic import arithmetic_path, arithmetic_tokenizer, load_arithmetic
from labkit.models.files import save_model
from labkit.models.hub import check_group_size, load_model, model_path
from labkit.models.outliers import plant_outliers
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
from labkit.models.smollm2 import ModelMissing, smollm2_path
from labkit.models.sums import Sums, exact_match, few_shot_sums, make_sums
from labkit.models.tiny import build_tiny, tiny_path

__all__ = [
    "LLAMA_2_7B",
    "LLAMA_3_1_8B",
    "QWEN3_0_6B",
    "QWEN3_8B",
    "QWEN3_8_27B",
    "QWEN3_32B",
    "SHAPES",
    "ModelMissing",
    "ModelShape",
    "RecurrentState",
    "Sums",
    "arithmetic_path",
    "arithmetic_tokenizer",
    "build_tiny",
    "check_group_size",
    "exact_match",
    "few_shot_sums",
    "load_arithmetic",
    "load_model",
    "make_sums",
    "model_path",
    "plant_outliers",
    "save_model",
    "smollm2_path",
    "tiny_path",
]
