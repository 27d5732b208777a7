"""The tensors of a checkpoint folder, each in the file that holds it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def open_tensors(folder: Path | str) -> dict[str, Any]:
    """Name of a tensor -> the open safetensors file with it: file.get_tensor(name) reads it.

    From model.safetensors, or the files that model.safetensors.index.json names. FileNotFoundError if one is missing.
    """
    from safetensors import safe_open

    folder = Path(folder)
    index = folder / "model.safetensors.index.json"
    if index.exists():
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    else:
        names = ["model.safetensors"]
    missing = [name for name in names if not (folder / name).exists()]
    if missing:
        raise FileNotFoundError(f"{folder} lacks {', '.join(missing)}: give the folder of a safetensors checkpoint")
    files = [safe_open(folder / name, framework="pt") for name in names]
    return {key: file for file in files for key in file.keys()}  # noqa: SIM118
