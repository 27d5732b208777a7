"""llm-compressor, the maintained successor of AutoAWQ: its checkpoint is read by ours, and as good a model."""

import copy
import os
import subprocess
from pathlib import Path

import pytest
from safetensors.torch import save_file

from labkit.models import arithmetic_tokenizer, load_arithmetic, plant_outliers, save_model
from labkit.models.sums import PROMPT_LENGTH, make_sums
from labkit.quant.checkpoints import dequantize_into, read_quantized
from labkit.quant.grid import Scheme
from labkit.quant.quality import measure_quality, reference_of
from labkit.quant.rtn import quantize_rtn

PYTHON = os.environ.get("LLM_COMPRESSOR_PYTHON")
CHILD = Path(__file__).with_name("llm_compressor_child.py")


@pytest.mark.skipif(
    not PYTHON, reason="llm-compressor needs an environment of its own: see tests/quant/llm_compressor_child.py"
)
def test_llm_compressors_awq_is_read_by_ours_and_beats_rounding(tmp_path):
    model, exercises = plant_outliers(load_arithmetic(), "weight", 20), make_sums(1000, seed=10**9)
    save_model(model, arithmetic_tokenizer(), tmp_path / "model")
    save_file({"tokens": make_sums(256, seed=10**9 + 7).tokens.reshape(64, -1)}, tmp_path / "tokens.safetensors")
    command = [PYTHON, CHILD, tmp_path / "model", tmp_path / "tokens.safetensors", tmp_path / "out"]
    env = os.environ | {"HF_HUB_OFFLINE": "1"}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    schemes = {one.scheme for one in read_quantized(tmp_path / "out").values()}
    assert {(s.bits, s.group_size, s.symmetric) for s in schemes} == {(4, 64, False)}
    reference = reference_of(model, exercises.tokens[:, :-1], skip=PROMPT_LENGTH - 1, batch_size=1000)
    theirs, rounded = dequantize_into(copy.deepcopy(model), tmp_path / "out"), copy.deepcopy(model)
    quantize_rtn(rounded, Scheme(4, 64))
    kl = [measure_quality(one, reference, batch_size=1000).kl_divergence for one in (theirs, rounded)]
    assert kl[0].high < kl[1].low, f"llm-compressor {kl[0]}, rounding to nearest {kl[1]}"
