"""Shapes of real models give the sizes that are known of them; the tiny models build, load and run."""

import json
import time

import pytest
import torch

from labkit import models
from labkit.models import ModelShape, build_tiny, tiny_path


@pytest.mark.parametrize(
    ("shape", "count"),
    [
        (models.LLAMA_2_7B, 6_738_415_616),
        (models.LLAMA_3_1_8B, 8_030_261_248),
        (models.QWEN3_0_6B, 596_049_920),
        (models.QWEN3_8B, 8_190_735_360),
        (models.QWEN3_32B, 32_762_123_264),
    ],
    ids=lambda x: getattr(x, "name", ""),
)
def test_a_shape_gives_the_number_of_parameters_in_the_published_checkpoint(shape, count):
    assert shape.weight_count == count


@pytest.mark.parametrize("shape", [models.LLAMA_3_1_8B, models.QWEN3_0_6B], ids=lambda x: x.name)
def test_transformers_builds_a_model_of_as_many_parameters(shape):
    transformers = pytest.importorskip("transformers")
    family = "Qwen3" if shape.qk_norm else "Llama"
    config = getattr(transformers, f"{family}Config")(
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        vocab_size=shape.vocab_size,
        tie_word_embeddings=shape.tied_embeddings,
    )
    with torch.device("meta"):
        model = getattr(transformers, f"{family}ForCausalLM")(config)
    assert sum(p.numel() for p in model.parameters()) == shape.weight_count


def test_a_token_of_kv_has_the_known_size():
    per_token = {s.name: s.attention_layers * s.kv_layer_bytes() // 1024 for s in models.SHAPES.values()}
    assert per_token == {
        "Llama-2-7B": 512, "Llama-3.1-8B": 128, "Qwen3-0.6B": 112, "Qwen3-8B": 144, "Qwen3-32B": 256, "Qwen3.8-27B": 64
    }  # fmt: skip


def test_the_hybrids_state_has_the_page_that_vllm_computes():
    state = models.QWEN3_8_27B.state
    assert (state.page_bytes(2), state.page_bytes(4)) == (1_634_304, 3_207_168)


def test_the_hybrids_block_is_the_size_seen_in_vllm():
    sizes = [models.QWEN3_8_27B.hybrid_block_size(state, multiple) for state in (2, 4) for multiple in (16, 64)]
    assert sizes == [400, 448, 784, 832]
    with pytest.raises(ValueError, match="Qwen3-8B has no recurrent state"):
        models.QWEN3_8B.hybrid_block_size()


def test_vllm_computes_the_same_state_page():
    mamba_utils = pytest.importorskip("vllm.model_executor.layers.mamba.mamba_utils")
    s = models.QWEN3_8_27B.state
    conv, matrices = mamba_utils.MambaStateShapeCalculator.gated_delta_net_state_shape(
        1, s.num_key_heads, s.num_value_heads, s.key_head_dim, s.value_head_dim, s.conv_kernel
    )
    assert torch.Size(conv).numel() * 2 + torch.Size(matrices).numel() * 4 == s.page_bytes(4)


def test_a_shape_without_sizes_says_what_its_weights_need():
    with pytest.raises(ValueError, match="mine: weights need hidden_size"):
        _ = ModelShape("mine", 1, 1, 1, 64, 1).weight_count


@pytest.fixture(scope="module", params=["qwen3", "llama"])
def tiny(request, tmp_path_factory):
    pytest.importorskip("transformers")
    return request.param, build_tiny(tmp_path_factory.mktemp("models") / "tiny", request.param)


def test_a_tiny_model_loads_and_its_logits_are_not_flat(tiny):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    _, folder = tiny
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer("The for statement iterates over a sequence", return_tensors="pt").input_ids
    with torch.no_grad():
        logits = model(ids).logits
    assert logits.shape == (1, ids.shape[1], 2048)
    assert logits.isfinite().all()
    top = logits[0, -1].topk(2).values
    assert top[0] - top[1] > 1e-3, "the best token must not hang on the last bit"
    assert 3.3e6 < sum(p.numel() for p in model.parameters()) < 3.6e6


def test_a_tiny_model_has_dimensions_that_vllm_runs_and_quantizes(tiny):
    family, folder = tiny
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == [{"qwen3": "Qwen3ForCausalLM", "llama": "LlamaForCausalLM"}[family]]
    assert config["head_dim"] in (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512), "vLLM's CPU attention head sizes"
    widths = [config["num_attention_heads"] * 64, config["num_key_value_heads"] * 64]
    widths += [config["hidden_size"], config["intermediate_size"]]
    assert all(width % 128 == 0 for width in widths), "int4 kernels want multiples of 128"
    assert config["num_attention_heads"] % config["num_key_value_heads"] == 0
    assert config["dtype" if "dtype" in config else "torch_dtype"] == "bfloat16"


def test_the_tokenizer_gives_back_what_it_read_and_knows_a_chat(tiny):
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(tiny[1])
    text = "Blöcke: def f(x):\n    return x"
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": "hi"}], tokenize=False, add_generation_prompt=True
    )
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.eos_token == "<|im_end|>"


def test_a_tiny_model_is_built_once_in_silence_and_a_foreign_folder_is_refused(tmp_path, monkeypatch, capfd):
    pytest.importorskip("transformers")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    began = time.perf_counter()
    folder = tiny_path()
    built = time.perf_counter() - began
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert tiny_path() == folder and (folder / "model.safetensors").stat().st_mtime_ns == stamp
    assert built < 30, f"building took {built:.1f} s"
    assert capfd.readouterr().err == "", "what is written to stderr costs a graded cell its points"
    (tmp_path / "precious").write_text("work")
    with pytest.raises(FileExistsError, match="not empty"):
        build_tiny(tmp_path)
    assert (tmp_path / "precious").exists()
    with pytest.raises(ValueError, match="family must be one of qwen3, llama"):
        build_tiny(tmp_path / "new", "gpt2")


def test_the_same_seed_gives_the_same_weights(tmp_path):
    pytest.importorskip("transformers")
    from safetensors.torch import load_file

    before = torch.random.get_rng_state()
    weights = [
        load_file(build_tiny(tmp_path / str(n), seed=seed) / "model.safetensors") for n, seed in enumerate((0, 0, 1))
    ]
    key = "model.layers.0.self_attn.q_proj.weight"
    assert torch.equal(weights[0][key], weights[1][key]) and not torch.equal(weights[0][key], weights[2][key])
    assert torch.equal(torch.random.get_rng_state(), before), "building a model moved the caller's random state"
