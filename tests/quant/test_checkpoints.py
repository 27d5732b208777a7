"""Checkpoints of int4: read back alike, and served by real vLLM as their dequantized copies say."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.models.tiny import tiny_path
from labkit.quant.awq import prepare_awq
from labkit.quant.checkpoints import dequantize_into, read_quantized, write_awq, write_compressed_tensors
from labkit.quant.grid import PER_CHANNEL, Scheme
from labkit.quant.inputs import observe_inputs
from labkit.quant.rtn import quantize_rtn
from tests.quant.vllm_logprobs import prompts

HALF = torch.float16
WRITERS = {"awq": write_awq, "compressed-tensors": write_compressed_tensors}


@pytest.mark.parametrize("kind", WRITERS)
@pytest.mark.parametrize("scheme", [Scheme(4, 64, False, HALF), Scheme(4, PER_CHANNEL, True, HALF)])
def test_what_is_written_is_read_back_alike(model, kind, scheme, tmp_path):
    made = quantize_rtn(model, scheme)
    folder = WRITERS[kind](model, made, tmp_path / "new" / "int4")
    read = read_quantized(folder)
    assert read.keys() == made.keys()
    for name, one in read.items():
        assert torch.equal(one.dequantize(), made[name].dequantize()), name
    config = json.loads((folder / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == kind and config["dtype"] == "float16"
    with pytest.raises(FileExistsError, match="not empty"):
        WRITERS[kind](model, made, folder)
    assert {path.name for path in folder.parent.iterdir()} == {"int4"}, "a scratch folder was left"


def test_a_checkpoint_is_put_into_a_model_whole_or_not_at_all(model, tmp_path):
    original, scheme = copy.deepcopy(model), Scheme(4, 64, scale_dtype=HALF)
    prepare_awq(model, observe_inputs(model, torch.arange(64)[None]), scheme)
    folder = write_awq(model, quantize_rtn(model, scheme), tmp_path / "awq")
    back = dequantize_into(copy.deepcopy(original), folder)
    for (name, ours), (_, theirs) in zip(back.named_parameters(), model.named_parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-6, msg=f"{name}: scales must be in what is before")
    original.model.layers[1].mlp.up_proj = torch.nn.Linear(128, 8, bias=False)
    before = original.model.norm.weight.clone()
    with pytest.raises(ValueError, match=r"up_proj\.weight of \[8, 128\], and has \[256, 128\]"):
        dequantize_into(original, folder)
    assert torch.equal(original.model.norm.weight, before)


def test_what_a_checkpoint_cannot_hold_is_refused_and_leaves_no_folder(model, tmp_path):
    made = quantize_rtn(model, Scheme(4, 64, scale_dtype=HALF))
    name = "model.layers.1.mlp.up_proj"
    with pytest.raises(ValueError, match=rf"look at {name}"):
        write_awq(model, {k: v for k, v in made.items() if k != name}, tmp_path / "a")
    other = quantize_rtn(model, Scheme(4, 32, scale_dtype=HALF))
    with pytest.raises(ValueError, match="2 schemes"):
        write_awq(model, made | {name: other[name]}, tmp_path / "a")
    with pytest.raises(ValueError, match=r"up_proj.*its linear \[256, 128\]"):
        write_awq(model, made | {name: made["model.layers.1.mlp.down_proj"]}, tmp_path / "a")
    with pytest.raises(ValueError, match="fit the scales that are stored"):
        write_awq(model, quantize_rtn(copy.deepcopy(model), Scheme(4, 64)), tmp_path / "a")
    with torch.no_grad():
        model.model.norm.weight[3] = 1e6
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds numbers beyond fp16"):
        write_compressed_tensors(model, made, tmp_path / "a")
    assert not list(tmp_path.iterdir())
    model.config.save_pretrained(tmp_path / "plain")
    with pytest.raises(ValueError, match="must be in AutoAWQ's GEMM format or pack-quantized"):
        read_quantized(tmp_path / "plain")


@torch.no_grad()
def log_probs(model, ids):
    """Of each token but the first, and of the whole vocabulary after the last."""
    found = model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    return found[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0], found[-1]


def test_real_vllm_serves_both_formats_as_the_dequantized_copies_say(tmp_path):
    from transformers import AutoModelForCausalLM

    original = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
    ids = prompts(original.config.vocab_size)
    calibration = torch.randint(0, original.config.vocab_size, (4, 64), generator=torch.Generator().manual_seed(0))
    scheme = Scheme(4, 64, scale_dtype=HALF)
    model = copy.deepcopy(original)
    prepare_awq(model, observe_inputs(model, calibration), scheme)
    folders = [write_awq(model, quantize_rtn(model, scheme), tmp_path / "awq")]
    model, scheme = copy.deepcopy(original), Scheme(4, 64, symmetric=True, scale_dtype=HALF)
    folders.append(write_compressed_tensors(model, quantize_rtn(model, scheme), tmp_path / "ct"))
    script = Path(__file__).with_name("vllm_logprobs.py")
    command = [sys.executable, script, tmp_path / "said.json", *folders]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr[-3000:]
    said = json.loads((tmp_path / "said.json").read_text())
    for folder, method in zip(folders, ("AWQ", "CompressedTensors"), strict=True):
        found, copied = said[str(folder)], dequantize_into(copy.deepcopy(original), folder).half()
        assert method in found["method"], "vLLM took the checkpoint for something else"
        off = far = 0.0
        for one, prompt, following in zip(ids, found["prompts"], found["next"], strict=True):
            for ours, theirs, plain in zip(
                log_probs(copied, one), (prompt, following), log_probs(original, one), strict=True
            ):
                off = max(off, (ours - torch.tensor(theirs)).abs().max().item())
                far = max(far, (plain - torch.tensor(theirs)).abs().max().item())
        assert off < 0.03, f"{folder.name}: vLLM is {off:.3f} nat off the dequantized copy"
        assert far > 0.3, "the unquantized model would have passed too: this proves nothing"
