"""A trained model of 1.6 M parameters that ships: a Qwen3 that adds and subtracts numbers of three digits.

It reads "012+345=" and writes "0357"; one character is one token. Its weights were made by
`python -m labkit.models.train_arithmetic`, and data/arithmetic.json holds their checksum and what they scored. Every
matrix has dimensions that are multiples of 64, and inputs that are multiples of 128, which int4 kernels ask for.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import torch

from labkit.models.files import cache_folder, import_transformers, save_model
from labkit.models.sums import VOCABULARY

DATA = Path(__file__).with_name("data")
SIZES: dict[str, Any] = {
    "vocab_size": 64,  # more than there are characters: a multiple of 64
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}


def new_arithmetic(seed: int) -> Any:
    """The model with random weights, in fp32: a transformers Qwen3ForCausalLM."""
    transformers = import_transformers()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**SIZES))


def load_arithmetic(folder: Path = DATA) -> Any:
    """The trained model, in fp32 and eval mode. RuntimeError if the weights are not those that were trained."""
    from safetensors.torch import load_file

    weights = folder / "arithmetic.safetensors"
    wanted = json.loads((folder / "arithmetic.json").read_text(encoding="utf-8"))["sha256"]
    if hashlib.sha256(weights.read_bytes()).hexdigest() != wanted:
        raise RuntimeError(f"{weights} is not the file that was trained: its SHA-256 should be {wanted}")
    model = new_arithmetic(seed=0)
    state = {name: weight.float() for name, weight in load_file(weights).items()}
    state["lm_head.weight"] = state["model.embed_tokens.weight"]  # they are one, and the file holds it once
    model.load_state_dict(state)
    return model.eval()


def arithmetic_tokenizer() -> Any:
    """A transformers tokenizer that splits text into characters, as the model reads it."""
    transformers = import_transformers()
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.WordLevel({c: i for i, c in enumerate(VOCABULARY)}, unk_token="\n"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="\n", pad_token="\n", model_max_length=SIZES["max_position_embeddings"]
    )


def arithmetic_path() -> Path:
    """The folder of the trained model as a checkpoint with its tokenizer, in fp16, for vLLM and transformers.

    It is in the cache directory, and written there if it is missing.
    """
    made = json.loads((DATA / "arithmetic.json").read_text(encoding="utf-8"))["sha256"]
    folder = cache_folder() / f"arithmetic-{made[:12]}-{import_transformers().__version__}"
    if not (folder / "config.json").exists():
        save_model(load_arithmetic(), arithmetic_tokenizer(), folder)
    return folder
