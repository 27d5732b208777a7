"""Greedy tokens are those of transformers on the same weights, whatever the engine does to get them."""

from __future__ import annotations

import pytest
import torch

from labkit.engine import Engine, Priority, SamplingParams

NEW = 20
GREEDY = SamplingParams(max_tokens=NEW, ignore_eos=True)
FORCED = {"num_blocks": 9, "max_num_batched_tokens": 20}  # 144 tokens for six requests that end with 297


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(1)
    made = [torch.randint(3, 2048, (n,), generator=generator).tolist() for n in (5, 33, 70, 17, 1)]
    return [*made[:3], [*made[2][:48], 7, 8, 9], *made[3:]]  # two share a prefix of three blocks


@pytest.fixture(scope="module")
def expected(tiny, family, prompts) -> list[list[int]]:
    """What transformers generates, one prompt at a time."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32)

    def generate(prompt: list[int]) -> list[int]:
        settings = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
        return model.generate(torch.tensor([prompt]), **settings)[0, len(prompt) :].tolist()

    return [generate(prompt) for prompt in prompts]


@pytest.mark.parametrize(
    "options",
    [
        {},
        FORCED,
        {**FORCED, "prefix_caching": False},
        {**FORCED, "block_size": 7, "num_blocks": 20},
        {**FORCED, "graphs": "capture", "policy": Priority()},
        {"graphs": "padded", "max_num_seqs": 6, "capture_sizes": (4,)},
        {**FORCED, "graphs": "capture", "overlap": True},
    ],
    ids=["roomy", "forced", "no-prefix-cache", "odd-blocks", "forced-captured", "padded", "forced-overlapped"],
)
def test_tokens_equal_those_of_transformers(tiny, family, prompts, expected, options, assert_whole):
    engine = Engine.load(tiny(family), max_model_len=128, **options)
    for round_ in ("first", "with a warm prefix cache"):
        tokens = engine.generate(prompts, GREEDY)
        for i, (got, want) in enumerate(zip(tokens, expected, strict=True)):
            assert got == want, f"{round_}: prompt {i} of {len(prompts[i])} tokens differs"
    counts = engine.counters
    if options.get("num_blocks") == 9:
        assert counts.preemptions > 0, "nothing was preempted: the test has lost its teeth"
    if options.get("prefix_caching", True):
        assert counts.prefix_hits > 0, "no prefix was found again"
    if options.get("graphs") == "capture":
        assert counts.replays == counts.graph_steps > 0 and counts.captures == 4
    assert_whole(engine)


def test_bf16_parts_from_transformers_only_where_the_two_best_logits_are_closer_than_its_noise(tiny, family, prompts):
    import transformers

    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = transformers.AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.bfloat16)
    whole = transformers.AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.bfloat16).float()
    engine = Engine.load(tiny(family), max_model_len=128, device=device, dtype=torch.bfloat16, **FORCED)
    agreed = 0
    for prompt, mine in zip(prompts, engine.generate(prompts, GREEDY), strict=True):
        ids = torch.tensor([[*prompt, *mine]])
        with torch.no_grad():
            exact, rounded = (m(ids).logits[0, len(prompt) - 1 : -1].float() for m in (whole, half))
        noise = (rounded - exact).abs().max()  # of one computation in bf16; ours and theirs are two
        best = exact.topk(2).values
        for step, token in enumerate(mine):
            if token != exact[step].argmax():
                margin = best[step, 0] - exact[step, token]
                assert margin <= 2 * noise, (
                    f"step {step}: {margin:.4f} below the best logit, bf16's noise is {noise:.4f}"
                )
                break
            agreed += 1
    assert agreed > len(prompts) * NEW // 4, f"only {agreed} tokens agree: the noise excuses nearly all of them"


@pytest.mark.slow  # every step is interpreted
def test_our_kernels_in_the_interpreter_give_the_tokens_of_transformers(tiny, family, prompts, expected):
    engine = Engine.load(tiny(family), max_model_len=128, kernels="triton", graphs="capture", max_num_seqs=4, **FORCED)
    assert engine.generate(prompts, GREEDY) == expected
    assert engine.counters.replays > 0 and engine.counters.preemptions > 0


@pytest.mark.parametrize("graphs", ["off", "capture"])
def test_our_kernels_give_the_tokens_of_plain_torch(mini, graphs):
    prompts = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [2, 7, 1], [3, 1, 4, 1, 5, 9, 2, 6]]
    options = {"max_num_batched_tokens": 8, "max_num_seqs": 2}
    params = SamplingParams(max_tokens=5, ignore_eos=True)
    want = mini(**options).generate(prompts, params)
    assert mini(kernels="triton", graphs=graphs, **options).generate(prompts, params) == want


def test_a_sharded_checkpoint_is_the_same_model(tiny, tmp_path):
    import json

    from safetensors.torch import load_file, save_file

    source = tiny("qwen3")
    tensors = load_file(source / "model.safetensors")
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, tmp_path / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "config.json").write_bytes((source / "config.json").read_bytes())
    made = [Engine.load(folder, max_model_len=64).generate([[5, 6, 7]]) for folder in (source, tmp_path)]
    assert made[0] == made[1]
    (tmp_path / "b.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"lacks b\.safetensors"):
        Engine.load(tmp_path)


def test_llama_3_stretches_rope_as_transformers_does():
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    from labkit.engine import ModelConfig
    from labkit.engine.model import rope_table

    scaling = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }  # fmt: skip
    theirs = LlamaConfig(rope_parameters=scaling, head_dim=64, max_position_embeddings=512)
    frequency, factor = ROPE_INIT_FUNCTIONS["llama3"](theirs, "cpu")
    angles = torch.outer(torch.arange(512).float(), frequency).repeat(1, 2)
    mine = rope_table(ModelConfig.from_dict(theirs.to_dict()), 512, torch.float32, torch.device("cpu"))
    torch.testing.assert_close(mine, torch.stack((angles.cos(), angles.sin())) * factor, rtol=1e-4, atol=1e-4)
