"""Takes the head that ships out of SmolLM2: `python -m labkit.quantlab.take_head`."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from labkit.models import load_model
from labkit.quantlab.head import FILE
from labkit.texts import calibration_windows, token_windows

LAYER, HEAD, HEAD_DIM = 11, 0, 64
CALIBRATION_TOKENS, EVALUATION_TOKENS = 96, 64


@torch.no_grad()
def read_head() -> dict[str, torch.Tensor]:
    """The head out of SmolLM2 itself, in fp16. ModelMissing where it is not installed."""
    model, tokenizer = load_model("smollm2")
    projection = model.model.layers[LAYER].self_attn.k_proj
    seen: list[torch.Tensor] = []
    handle = projection.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten(0, 1)))
    model(calibration_windows(tokenizer, count=2, length=256))
    model(token_windows(tokenizer, "persuasion", count=1, length=256))
    handle.remove()
    generator = torch.Generator().manual_seed(0)
    picked = [
        x[torch.randperm(len(x), generator=generator)[:count]].half().contiguous()
        for x, count in zip(seen, (CALIBRATION_TOKENS, EVALUATION_TOKENS), strict=True)
    ]
    rows = projection.weight[HEAD * HEAD_DIM : (HEAD + 1) * HEAD_DIM]
    return {"weight": rows.half().contiguous(), "calibration": picked[0], "evaluation": picked[1]}


def main() -> None:
    """Write the file that ships."""
    from safetensors.torch import save_file

    parser = argparse.ArgumentParser(description="take the head that ships out of SmolLM2")
    parser.add_argument("--out", type=Path, default=FILE)
    save_file(read_head(), parser.parse_args().out)


if __name__ == "__main__":
    main()
