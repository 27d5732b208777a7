"""Tiny Qwen3 and Llama models with random weights and a tokenizer of their own, built offline in about a second.

Real vLLM and transformers run them: the head size is one that vLLM's CPU attention supports, and every matrix has
dimensions that are multiples of 128, which int4 kernels ask for. The tokenizer is trained on `pydoc_data.topics`, the
460 kB of English that ship inside CPython. Weights are drawn five times wider than usual: at the usual width logits
are nearly flat, and greedy tokens would hang on the last bit.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from labkit.models.files import cache_folder, import_transformers, no_progress_bar, written_whole

SIZES: dict[str, Any] = {
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 2048,
    "initializer_range": 0.08,
    "tie_word_embeddings": False,
}
FAMILIES = ("qwen3", "llama")
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_path(family: str = "qwen3") -> Path:
    """The folder of a tiny model in the cache directory, built there if it is missing (see `build_tiny`)."""
    return build_tiny(cache_folder() / f"tiny-{family}", family)


def build_tiny(folder: Path | str, family: str = "qwen3", *, seed: int = 0) -> Path:
    """Write a tiny model (3.4 M parameters, bf16, 7 MB) with its tokenizer to `folder`, and give that folder.

    family: "qwen3" or "llama". A folder that holds the same model already, made by the same version of transformers,
    is left as it is; one that holds anything else is refused with FileExistsError. ValueError for an unknown family.
    """
    if family not in FAMILIES:
        raise ValueError(f"family must be one of {', '.join(FAMILIES)}, and is {family!r}")
    folder = Path(folder)
    recipe = {"family": family, "seed": seed, "transformers": import_transformers().__version__, **SIZES}
    made = folder / "recipe.json"
    if made.exists() and json.loads(made.read_text(encoding="utf-8")) == recipe:
        return folder
    if folder.exists() and any(folder.iterdir()) and not made.exists():
        raise FileExistsError(f"{folder} is not empty and holds no tiny model: give a new folder")
    with written_whole(folder) as new:
        _write(new, family, seed)
        (new / "recipe.json").write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return folder


def _write(folder: Path, family: str, seed: int) -> None:
    transformers = import_transformers()
    tokenizer = _tokenizer(transformers)
    ids = {"bos_token_id": None, "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config_class, model_class = {
        "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
        "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    }[family]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config_class(**SIZES, **ids)).to(torch.bfloat16)
    del ids["bos_token_id"]
    model.generation_config = transformers.GenerationConfig(**ids, do_sample=False)
    with no_progress_bar():
        model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _tokenizer(transformers: Any) -> Any:
    """A byte-level BPE of SIZES["vocab_size"] tokens with a chat template."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=SIZES["vocab_size"],
        special_tokens=SPECIALS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[0],
        additional_special_tokens=[SPECIALS[1]],
        model_max_length=SIZES["max_position_embeddings"],
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast
