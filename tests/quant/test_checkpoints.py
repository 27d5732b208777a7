"""Checkpoints of int4: read back alike, and served by real vLLM as their dequantized copies say."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit.models import arithmetic_tokenizer, load_arithmetic, plant_outliers, tiny_path
from labkit.models.sums import PROMPT_LENGTH, make_sums
from labkit.quant.awq import prepare_awq
from labkit.quant.checkpoints import dequantize_into, read_quantized, write_awq, write_compressed_tensors
from labkit.quant.grid import PER_CHANNEL, Scheme
from labkit.quant.inputs import observe_inputs
from labkit.quant.rtn import quantize_rtn

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
    assert config["architectures"] == ["Qwen3ForCausalLM"], "vLLM would not know that it generates"
    config["quantization_config"].setdefault("version", "0.19.0")  # the library writes its own there
    (folder / "config.json").write_text(json.dumps(config))
    assert read_quantized(folder).keys() == made.keys()
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


def furthest(said, model, prompts, least):
    """How far, in nats, vLLM's log-probabilities are from those of `model`, at most.

    Of those above `least`: a logit of -40 is rounded to 0.03 in fp16, whoever computes it.
    """
    off = 0.0
    for one, *theirs in zip(prompts, said["prompts"], said["next"], strict=True):
        for ours, them in zip(log_probs(model, one), theirs, strict=True):
            off = max(off, (ours - torch.tensor(them))[ours > least].abs().max().item())
    return off


def served(folders, tmp_path):
    """What real vLLM says to the prompts of each folder."""
    (tmp_path / "given.json").write_text(json.dumps({str(folder): prompts for folder, prompts in folders.items()}))
    script = Path(__file__).with_name("vllm_logprobs.py")
    command = [sys.executable, script, tmp_path / "given.json", tmp_path / "said.json"]
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr[-3000:]
    return list(json.loads((tmp_path / "said.json").read_text()).values())


def test_real_vllm_serves_both_formats_as_the_dequantized_copies_say(tmp_path):
    """AutoAWQ's from a model that rounding alone would destroy; compressed-tensors from one of random weights."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    scheme = Scheme(4, 64, scale_dtype=HALF)
    planted = plant_outliers(load_arithmetic(), "weight", 20)
    random = AutoModelForCausalLM.from_pretrained(tiny_path(), dtype=torch.float32).eval()
    sums = make_sums(24, seed=10**9)
    words = [[5 + (i * 7 + j * 13) % 2000 for j in range(n)] for i, n in enumerate([40, 17, 33])]
    model = copy.deepcopy(planted)
    prepare_awq(model, observe_inputs(model, make_sums(256, seed=10**9 + 7).tokens, batch_size=256), scheme)
    awq = write_awq(model, quantize_rtn(model, scheme), tmp_path / "awq", arithmetic_tokenizer())
    model, tokenizer = copy.deepcopy(random), AutoTokenizer.from_pretrained(tiny_path())
    ct = write_compressed_tensors(model, quantize_rtn(model, scheme), tmp_path / "ct", tokenizer)
    asked = {awq: sums.tokens[:, :-1].tolist(), ct: words}
    expected = ((planted, "AWQ", -3), (random, "CompressedTensors", -10))
    for (folder, prompts), said, (original, method, least) in zip(
        asked.items(), served(asked, tmp_path), expected, strict=True
    ):
        assert method in said["method"], "vLLM took the checkpoint for something else"
        off = furthest(said, dequantize_into(copy.deepcopy(original), folder).half(), prompts, least)
        far = furthest(said, original, prompts, least)
        assert off < 0.03, f"{folder.name}: vLLM is {off:.3f} nat off the dequantized copy"
        assert far > 5 * off, f"{folder.name}: the unquantized model is as near, {far:.3f} nat: this proves nothing"
        if folder == awq:
            answers = torch.tensor(said["prompts"])[:, PROMPT_LENGTH - 1 :]
            sure = (answers > -0.7).all(1).float().mean()  # more likely than all others together, each digit
            assert sure > 0.9, f"vLLM is sure of {sure:.0%} of the right answers only"
