"""The arithmetic model that ships: it computes, it is trained the same twice, outliers change nothing."""

import copy
import hashlib
import json
import shutil

import pytest
import torch

from labkit.models import (
    arithmetic_path,
    arithmetic_tokenizer,
    exact_match,
    few_shot_sums,
    load_arithmetic,
    make_sums,
    plant_outliers,
    save_model,
)
from labkit.models.arithmetic import DATA
from labkit.models.sums import PROMPT_LENGTH, VOCABULARY
from labkit.models.train_arithmetic import HELD_OUT_SEED, STEPS, train
from labkit.quant import PER_CHANNEL, Scheme, clamp_sigmas, round_trip

SUMS = make_sums(500, HELD_OUT_SEED)


@pytest.fixture(scope="module")
def shipped():
    """Not to be changed: take a deep copy."""
    return load_arithmetic()


def as_text(tokens: torch.Tensor) -> str:
    return "".join(VOCABULARY[token] for token in tokens)


def test_exercises_are_right_and_as_the_model_reads_them():
    signs = []
    for row in SUMS.tokens[:300]:
        a, sign, b, result = (text := as_text(row))[:3], text[3], text[4:7], text[8:12]
        assert text[7] == "=" and text[12] == "\n" and len(text) == 13
        assert int(result) == (int(a) + int(b) if sign == "+" else int(a) - int(b)) >= 0, text
        signs.append(sign)
    assert 0.4 < signs.count("+") / 300 < 0.6
    assert SUMS.is_answer[0].nonzero().flatten().tolist() == [8, 9, 10, 11]
    assert torch.equal(make_sums(5, 1).tokens, make_sums(5, 1).tokens)
    assert not torch.equal(make_sums(5, 1).tokens, make_sums(5, 2).tokens)
    with pytest.raises(ValueError, match="count must be at least 1, and is 0"):
        make_sums(0, 1)


def test_the_shipped_model_answers_nearly_all_exercises_right(shipped):
    recorded = json.loads((DATA / "arithmetic.json").read_text())
    share = exact_match(shipped, SUMS).float().mean().item()
    assert share > 0.99 and abs(share - recorded["exact_match"]) < 0.01, (share, recorded)
    assert HELD_OUT_SEED == recorded["held_out_seed"] > STEPS == recorded["steps"], "a batch of training is no test"


def test_exact_match_is_what_greedy_decoding_writes(shipped):
    model = plant_outliers(copy.deepcopy(shipped), "weight", 20)
    quantize_all(model, Scheme(group_size=128))  # right at some, wrong at others
    sums = make_sums(100, 7)
    written = sums.tokens[:, :PROMPT_LENGTH]
    with torch.no_grad():
        for _ in range(4):
            written = torch.cat([written, model(written).logits[:, -1:].argmax(-1)], 1)
    right = exact_match(model, sums, batch_size=64)
    assert torch.equal(right, (written == sums.tokens[:, :12]).all(1))
    assert 0.02 < right.float().mean() < 0.98, "all right or all wrong proves little"


def test_every_dimension_fits_int4_kernels_and_the_file_is_small(shipped):
    for name, weight in shipped.named_parameters():
        if weight.dim() == 2:
            assert weight.shape[0] % 64 == 0 and weight.shape[1] % 128 == 0, (name, weight.shape)
    assert 1.5e6 < sum(p.numel() for p in shipped.parameters()) < 1.7e6
    assert (DATA / "arithmetic.safetensors").stat().st_size < 3.3e6
    assert shipped.lm_head.weight is shipped.model.embed_tokens.weight, "they are tied"


def test_a_damaged_file_is_refused(tmp_path):
    folder = tmp_path / "data"
    shutil.copytree(DATA, folder)
    load_arithmetic(folder)
    content = bytearray((folder / "arithmetic.safetensors").read_bytes())
    content[-1] ^= 1
    (folder / "arithmetic.safetensors").write_bytes(content)
    with pytest.raises(RuntimeError, match=r"not the file that was trained: its SHA-256 should be [0-9a-f]{64}"):
        load_arithmetic(folder)


def test_a_training_comes_out_the_same_twice_and_leaves_the_callers_settings_alone():
    threads, state = torch.get_num_threads(), torch.random.get_rng_state()
    made = [train(steps=4, batch=16, progress=False) for _ in range(2)]
    digests = [hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in m.parameters())).digest() for m in made]
    assert digests[0] == digests[1], "a seed is missing, or the order of a sum is left to chance"
    assert torch.get_num_threads() == threads and torch.equal(torch.random.get_rng_state(), state)


def test_some_steps_of_training_learn_something():
    def loss(model):
        tokens = SUMS.tokens[:100]
        logits = model(tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_LENGTH:].flatten()).item()

    models = [train(steps=steps, batch=32, progress=False) for steps in (1, 10)]
    with torch.no_grad():
        first, later = map(loss, models)
    assert later < 0.9 * first, (first, later)


@torch.no_grad()
def quantize_all(model, scheme, sigmas=None):
    for name, linear in model.named_modules():
        if isinstance(linear, torch.nn.Linear) and name != "lm_head":
            weight = linear.weight if sigmas is None else clamp_sigmas(linear.weight, sigmas, scheme)
            linear.weight.copy_(round_trip(weight, scheme))
    return model


@torch.no_grad()
@pytest.mark.parametrize("kind", ["weight", "activation"])
@pytest.mark.parametrize(("factor", "most"), [(16, 0.0), (20, 2e-4)])
def test_planted_outliers_leave_the_outputs_as_they_are(shipped, kind, factor, most):
    tokens = SUMS.tokens[:100, :-1]
    planted = plant_outliers(copy.deepcopy(shipped), kind, factor)
    before, after = shipped(tokens).logits, planted(tokens).logits
    assert (before - after).abs().max() <= most, "logits of about 20 may move by fp32 rounding, by nothing for 2^n"
    assert not torch.equal(planted.model.layers[0].mlp.up_proj.weight, shipped.model.layers[0].mlp.up_proj.weight)


def test_planted_outliers_are_where_they_are_said_to_be(shipped):
    layer = plant_outliers(copy.deepcopy(shipped), "weight", 16).model.layers[0]
    for weight, original in (
        (layer.self_attn.q_proj.weight, shipped.model.layers[0].self_attn.q_proj.weight),
        (layer.mlp.down_proj.weight, shipped.model.layers[0].mlp.down_proj.weight),
    ):
        grown = (weight.norm(dim=0) / original.norm(dim=0)).round().tolist()
        assert sorted(set(grown)) == [1, 16] and grown.count(16) == int(0.03 * len(grown))
    tokens = SUMS.tokens[:100, :-1]
    seen = {}
    for kind in ("weight", "activation"):
        model = plant_outliers(copy.deepcopy(shipped), kind, 16)
        model.model.layers[0].mlp.down_proj.register_forward_hook(lambda m, x, y, kind=kind: seen.update({kind: x[0]}))
        with torch.no_grad():
            model(tokens)
    channels = [seen[kind].abs().mean((0, 1)) for kind in ("activation", "weight")]
    assert ((channels[0] / channels[1]).round() == 256).sum() == int(0.03 * 768), "16 times larger against 16 smaller"


@pytest.mark.parametrize("seed", [0, 1])
def test_weight_outliers_ruin_int4_until_they_are_clamped(shipped, seed):
    scheme = Scheme(bits=4, group_size=PER_CHANNEL)
    planted = plant_outliers(copy.deepcopy(shipped), "weight", seed=seed)
    shares = {
        "whole": exact_match(quantize_all(copy.deepcopy(shipped), scheme), SUMS),
        "planted": exact_match(quantize_all(copy.deepcopy(planted), scheme), SUMS),
        "clamped": exact_match(quantize_all(planted, scheme, sigmas=3), SUMS),
    }
    share = {name: right.float().mean().item() for name, right in shares.items()}
    assert share["planted"] < 0.05 and share["clamped"] > 0.9 and share["whole"] > 0.99, share


def test_planting_refuses_what_does_not_fit(shipped):
    with pytest.raises(ValueError, match="kind must be one of weight, activation, and is 'wt'"):
        plant_outliers(shipped, "wt", 20)
    with pytest.raises(ValueError, match=r"factor must be above 1, and is 0\.5"):
        plant_outliers(shipped, "weight", 0.5)
    with pytest.raises(ValueError, match=r"share must be in \(0, 1\], and is 0"):
        plant_outliers(shipped, "weight", 20, share=0)
    with pytest.raises(ValueError, match=r"model must be built like a Llama or Qwen3.*, and is Linear"):
        plant_outliers(torch.nn.Linear(2, 2), "weight", 20)


def test_the_checkpoint_of_the_model_loads_with_its_tokenizer_and_says_the_same(shipped, tmp_path, monkeypatch, capfd):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = arithmetic_path()
    assert arithmetic_path() == folder
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert json.loads((folder / "config.json").read_text())["dtype"] == "float16"
    assert capfd.readouterr().err == "", "what is written to stderr costs a graded cell its points"
    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder).float(), AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("123+456=", return_tensors="pt").input_ids
    assert torch.equal(ids[0], torch.tensor([VOCABULARY.index(c) for c in "123+456="]))
    written = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert tokenizer.decode(written) == "0579\n", "it writes the answer and stops"
    with torch.no_grad():
        assert torch.allclose(model(ids).logits, shipped(ids).logits, atol=1e-4)


def test_a_model_is_saved_in_another_dtype_and_stays_as_it_is(shipped, tmp_path):
    save_model(shipped, arithmetic_tokenizer(), tmp_path / "made", torch.bfloat16)
    assert shipped.dtype == torch.float32
    assert json.loads((tmp_path / "made/config.json").read_text())["dtype"] == "bfloat16"
    save_model(shipped, arithmetic_tokenizer(), tmp_path / "made", torch.float16)
    assert json.loads((tmp_path / "made/config.json").read_text())["dtype"] == "float16"
    (tmp_path / "precious").write_text("work")
    with pytest.raises(FileExistsError, match="not empty and holds no model"):
        save_model(shipped, arithmetic_tokenizer(), tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["made", "precious"], "scratch folders are left behind"


def test_sums_for_a_language_model_are_shown_then_asked():
    tokenizer = arithmetic_tokenizer()
    sums = few_shot_sums(tokenizer, count=40, seed=1, digits=(2, 1), shots=3)
    with pytest.raises(ValueError, match="count and digits must be at least 1, shots at least 0"):
        few_shot_sums(tokenizer, 1, 1, digits=(0, 1))
    assert len(sums) == 40 and sums.tokens.shape == sums.is_answer.shape
    for tokens, is_answer in zip(sums.tokens, sums.is_answer, strict=True):
        end = int(is_answer.nonzero().max()) + 1
        # The unknown space reads as a newline: what is left is digits and signs.
        text = as_text(tokens[:end]).split("\n")
        numbers = [part for part in text if part not in ("", "+", "=")]
        lines = [numbers[start : start + 3] for start in range(0, len(numbers), 3)]
        (a, b, answer) = lines[-1]
        assert len(lines) == 3 + 1 and len(a) == 2 and len(b) == 1
        assert all(int(x) + int(y) == int(z) for x, y, z in lines)
        assert as_text(tokens[is_answer]) == f"\n{answer}\n", "the answer is the number and the end of its line"
        assert not is_answer[end:].any() and not tokens[end:].any()
