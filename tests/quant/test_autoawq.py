"""AutoAWQ itself, beside ours: the same bits when it packs, and as good a model when it searches."""

import copy
import hashlib
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from labkit.models import arithmetic_tokenizer, load_arithmetic, plant_outliers, save_model
from labkit.models.sums import PROMPT_LENGTH, make_sums
from labkit.quant.awq import prepare_awq
from labkit.quant.checkpoints import dequantize_into
from labkit.quant.grid import Scheme, quantize
from labkit.quant.inputs import observe_inputs
from labkit.quant.packing import from_awq, to_awq
from labkit.quant.quality import measure_quality, reference_of
from labkit.quant.rtn import quantize_rtn

HERE = Path(__file__).parent
RELEASE = HERE / "autoawq-0.2.9.tar.gz"
SHA256 = "f3397687118c7d23c769de0de05ff1dca8950a2644acbe1b6eb1399c691fe7ee"


@pytest.fixture(scope="module")
def autoawq(tmp_path_factory):
    """Runs a command of autoawq_child.py, all of its arguments but the source."""
    assert hashlib.sha256(RELEASE.read_bytes()).hexdigest() == SHA256, "not the release that was published"
    folder = tmp_path_factory.mktemp("autoawq")
    with tarfile.open(RELEASE) as release:
        release.extractall(folder, filter="data")

    def run(*arguments):
        command = [sys.executable, HERE / "autoawq_child.py", folder / "autoawq-0.2.9", *arguments]
        env = os.environ | {"HF_HUB_OFFLINE": "1"}
        done = subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=280, env=env)
        assert done.returncode == 0, done.stderr[-3000:]

    return run


def test_autoawq_packs_the_same_bits_and_reads_ours_alike(autoawq, tmp_path):
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0))
    made = quantize(weight, Scheme(4, 64, scale_dtype=torch.float16))
    given = {
        "weight": made.dequantize(),
        "scales": made.scales.float().T.contiguous(),
        "zeros": made.zeros.float().T.contiguous(),
    }
    save_file(given, tmp_path / "given.safetensors")
    autoawq("pack", tmp_path / "given.safetensors", tmp_path / "out.safetensors")
    theirs, ours = load_file(tmp_path / "out.safetensors"), to_awq(made)
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype and torch.equal(tensor, theirs[name]), name
    assert torch.equal(theirs["dequantized"], made.dequantize().half())
    assert torch.equal(from_awq(theirs).codes, made.codes)


@pytest.mark.slow  # 30 s of computing: it runs each layer anew for each candidate
def test_autoawq_destroys_a_model_on_a_cpu_and_patched_it_saves_it_as_ours_does(autoawq, tmp_path):
    """Its search multiplies its own backup on a CPU (`.cpu()` copies nothing there), so that a layer stays scaled.

    No error is raised, and random weights would not show it: only what the trained model says does. Its loss is that of
    the whole attention or MLP, which ours is not; both must be better than rounding.
    """
    model, exercises = plant_outliers(load_arithmetic(), "weight", 20), make_sums(1000, seed=10**9)
    save_model(model, arithmetic_tokenizer(), tmp_path / "model")
    reference = reference_of(model, exercises.tokens[:, :-1], skip=PROMPT_LENGTH - 1, batch_size=1000)
    tokens = make_sums(256, seed=10**9 + 7).tokens.reshape(64, -1)
    save_file({"tokens": tokens}, tmp_path / "tokens.safetensors")
    kl = {}
    for version in ("stock", "patched"):
        folder = tmp_path / version
        autoawq("quantize", tmp_path / "model", tmp_path / "tokens.safetensors", folder, version)
        made = dequantize_into(copy.deepcopy(model), folder)
        kl[version] = measure_quality(made, reference, batch_size=1000).kl_divergence
    scheme = Scheme(4, 64, scale_dtype=torch.float16)
    rounded, ours = copy.deepcopy(model), copy.deepcopy(model)
    quantize_rtn(rounded, scheme)
    prepare_awq(ours, observe_inputs(ours, tokens), scheme)
    quantize_rtn(ours, scheme)
    for name, made in {"rtn": rounded, "ours": ours}.items():
        kl[name] = measure_quality(made, reference, batch_size=1000).kl_divergence
    assert kl["stock"].low > 5 * kl["patched"].high, f"the bug is gone, or no longer shows: {kl}"
    assert kl["patched"].high < kl["rtn"].low and kl["ours"].high < kl["rtn"].low, kl
