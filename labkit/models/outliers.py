"""Outlier channels planted into a model that computes the same as before: what large models grow by themselves.

Each decoder layer gets them at three places: norm to q, k, v; norm to gate, up; up to down. What writes a channel is
multiplied by a factor, and the columns that read it are divided by the same: the product stays. "weight" makes columns
of large weights that meet small inputs, "activation" the opposite, which is what real models have (Dettmers et al.,
arXiv 2208.07339). SmoothQuant (arXiv 2211.10438) and AWQ (arXiv 2306.00978) use the same identity the other way round.
"""

from __future__ import annotations

from typing import Any

import torch

KINDS = ("weight", "activation")


@torch.no_grad()
def plant_outliers(model: Any, kind: str, factor: float = 20.0, *, share: float = 0.03, seed: int = 0) -> Any:
    """Plant outliers in place, and give the model back; its outputs change by rounding, or not at all for factor 16.

    model: a transformers model built like a Llama or Qwen3. kind: "weight" or "activation". factor: how much larger
    they become, above 1; a power of two rounds nothing. share: of a layer's channels, at least one. ValueError names an
    argument that does not fit.
    """
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {', '.join(KINDS)}, and is {kind!r}")
    if not factor > 1:
        raise ValueError(f"factor must be above 1, and is {factor}")
    if not 0 < share <= 1:
        raise ValueError(f"share must be in (0, 1], and is {share}")
    layers = getattr(getattr(model, "model", None), "layers", None)
    if layers is None:
        raise ValueError(f"model must be built like a Llama or Qwen3 (model.layers), and is {type(model).__name__}")
    generator = torch.Generator().manual_seed(seed)
    step = 1 / factor if kind == "weight" else factor

    def scales(like: torch.Tensor) -> torch.Tensor:
        made = torch.ones(len(like))
        made[torch.randperm(len(like), generator=generator)[: max(1, int(len(like) * share))]] = step
        return made.to(like.device, like.dtype)

    for layer in layers:
        attention, mlp = layer.self_attn, layer.mlp
        for norm, readers in (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj)),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj)),
        ):
            chosen = scales(norm.weight)
            norm.weight *= chosen
            for reader in readers:
                reader.weight /= chosen
        chosen = scales(mlp.up_proj.weight)
        mlp.up_proj.weight *= chosen[:, None]
        mlp.down_proj.weight /= chosen
    return model
