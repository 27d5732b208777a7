"""An AutoAWQ checkpoint in the engine: the tokens of its dequantized copy."""

from __future__ import annotations

import pytest
import torch

from labkit.engine import Engine, SamplingParams
from labkit.models import arithmetic_tokenizer, load_arithmetic, make_sums, save_model
from labkit.models.sums import PROMPT_LENGTH
from labkit.quant.checkpoints import dequantize_into, write_awq
from labkit.quant.grid import Scheme, quantize
from labkit.quant.inputs import linears_of

PROMPTS = make_sums(4, seed=10**9).tokens[:, :PROMPT_LENGTH].tolist()
PARAMS = SamplingParams(max_tokens=5, ignore_eos=True)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """The arithmetic model in 4 bits, and its dequantized copy."""
    root = tmp_path_factory.mktemp("int4")
    model = load_arithmetic()
    scheme = Scheme(4, 64, scale_dtype=torch.float16)
    codes = {name: quantize(linear.weight.detach(), scheme) for name, linear in linears_of(model).items()}
    awq = write_awq(model, codes, root / "awq")
    return awq, save_model(
        dequantize_into(model, awq), arithmetic_tokenizer(), root / "dequantized", dtype=torch.float32
    )


def test_an_awq_checkpoint_gives_the_tokens_of_its_dequantized_copy_in_float32(folders):
    awq, copy = (Engine.load(folder, max_model_len=32, dtype=torch.float32) for folder in folders)
    assert awq.generate(PROMPTS, PARAMS) == copy.generate(PROMPTS, PARAMS)


def test_our_int4_kernel_in_the_engine_gives_them_too(folders):
    params = SamplingParams(max_tokens=2, ignore_eos=True)  # the interpreter takes five seconds a token
    device = "cuda" if torch.cuda.is_available() else "cpu"
    want = Engine.load(folders[1], max_model_len=32, dtype=torch.float32).generate(PROMPTS[:1], params)
    ours = Engine.load(folders[0], max_model_len=32, dtype=torch.float16, device=device, kernels="triton")
    assert not isinstance(ours.runner.model.weights.layers[0].qkv, torch.Tensor), "the weights were dequantized"
    assert ours.generate(PROMPTS[:1], params) == want
