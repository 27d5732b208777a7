"""What a model's linear layers read: the calibration that AWQ, GPTQ and the clip search work from.

Linear layers that read the same tensor form a site. A decoder layer of the Llama family has four: q, k, v; o; gate,
up; down.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Calls = list[tuple[torch.Tensor, dict]]  # of a decoder layer, for each batch: hidden states, keyword arguments
FAMILIES = ("llama", "mistral", "qwen2", "qwen3")  # pre-norm, x * weight in the norm, gate and up beside each other


@dataclass(frozen=True)
class Site:
    """Linear layers that read one tensor, and what writes it.

    names: of the linears, within the model. before: the norm or linear that writes what they read, and commutes with a
    scale of each of its outputs. writer: [in] int64, the output of `before` that each input comes from; where query
    heads share a v, several inputs of o come from one.
    """

    names: tuple[str, ...]
    linears: tuple[nn.Linear, ...]
    before: nn.Module
    writer: torch.Tensor


@dataclass
class Inputs:
    """Statistics of a site's inputs. hessian: mean of x x^T, [in, in]; mean_abs: mean of |x|, [in]; fp32."""

    hessian: torch.Tensor
    mean_abs: torch.Tensor
    count: int = 0

    @staticmethod
    def none(width: int, device: torch.device) -> Inputs:
        """Of no input yet."""
        return Inputs(torch.zeros(width, width, device=device), torch.zeros(width, device=device))

    def add(self, x: torch.Tensor) -> None:
        """Take in more inputs, [..., in]."""
        x = x.detach().reshape(-1, x.shape[-1]).float()
        self.count += len(x)
        share = len(x) / self.count
        self.hessian += (x.T @ x / len(x) - self.hessian) * share
        self.mean_abs += (x.abs().mean(0) - self.mean_abs) * share

    def scaled(self, scales: torch.Tensor) -> Inputs:
        """The same inputs, each channel divided by its scale, [in]."""
        return Inputs(self.hessian / scales[:, None] / scales, self.mean_abs / scales, self.count)


def linears_of(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers that are quantized, by name: those of the decoder layers, which leaves the output head out."""
    return {
        name: linear
        for named in decoder_layers(model)
        for site in sites_of(*named)
        for name, linear in zip(site.names, site.linears, strict=True)
    }


def decoder_layers(model: nn.Module) -> list[tuple[str, Any]]:
    """(name, layer) of each decoder layer. ValueError if the model is not of one of the FAMILIES."""
    family = getattr(getattr(model, "config", None), "model_type", type(model).__name__)
    if family not in FAMILIES:
        raise ValueError(f"model must be one of {', '.join(FAMILIES)}, whose norms are known to fold, and is {family}")
    layers: Any = model.get_submodule("model.layers")
    return [(f"model.layers.{i}", layer) for i, layer in enumerate(layers)]


def sites_of(name: str, layer: Any) -> list[Site]:
    """The four sites of a decoder layer called `name`, in the order in which they run."""
    attention, mlp = layer.self_attn, layer.mlp
    rows: list[tuple[str, Any, tuple[str, ...], nn.Module]] = [
        ("self_attn", attention, ("q_proj", "k_proj", "v_proj"), layer.input_layernorm),
        ("self_attn", attention, ("o_proj",), attention.v_proj),
        ("mlp", mlp, ("gate_proj", "up_proj"), layer.post_attention_layernorm),
        ("mlp", mlp, ("down_proj",), mlp.up_proj),
    ]
    sites = []
    for part, owner, names, before in rows:
        linears = tuple(getattr(owner, n) for n in names)
        weight = linears[0].weight
        writer = torch.arange(weight.shape[1], device=weight.device)
        if before is attention.v_proj:
            heads = writer.reshape(-1, attention.head_dim)
            written = torch.arange(before.weight.shape[0], device=weight.device).reshape(-1, attention.head_dim)
            writer = written.repeat_interleave(len(heads) // len(written), 0).flatten()
        sites.append(Site(tuple(f"{name}.{part}.{n}" for n in names), linears, before, writer))
    return sites


@torch.no_grad()
def observe_inputs(model: nn.Module, tokens: torch.Tensor, *, batch_size: int = 4) -> dict[str, Inputs]:
    """Statistics of what each linear layer reads on calibration text, by name.

    tokens: [sequences, length] int64. They must not come from the text that the model is evaluated on.
    """
    _check_tokens(tokens, batch_size)
    found: dict[str, Inputs] = {}
    handles = []
    for site in [site for named in decoder_layers(model) for site in sites_of(*named)]:
        weight = site.linears[0].weight
        inputs = Inputs.none(weight.shape[1], weight.device)
        found |= dict.fromkeys(site.names, inputs)  # a site's linears share them
        handles.append(site.linears[0].register_forward_pre_hook(lambda _, args, inputs=inputs: inputs.add(args[0])))
    try:
        for part in tokens.split(batch_size):
            model(part, use_cache=False)
    finally:
        for handle in handles:
            handle.remove()
    return found


class _Reached(Exception):
    """Raised to leave a model as soon as it calls what was waited for."""


@torch.no_grad()
def site_inputs(site: Site, layer: nn.Module, calls: Calls) -> Inputs:
    """Statistics of what one site of a decoder layer reads in these calls. What comes after it is not computed."""
    weight = site.linears[0].weight
    inputs = Inputs.none(weight.shape[1], weight.device)

    def take(_: nn.Module, args: tuple) -> None:
        inputs.add(args[0])
        raise _Reached

    handle = site.linears[0].register_forward_pre_hook(take)
    try:
        for hidden, kwargs in calls:
            with contextlib.suppress(_Reached):
                layer(hidden, **kwargs)
    finally:
        handle.remove()
    return inputs


@torch.no_grad()
def layer_calls(model: nn.Module, tokens: torch.Tensor, batch_size: int) -> Calls:
    """What the first decoder layer is called with."""
    _check_tokens(tokens, batch_size)
    first = decoder_layers(model)[0][1]
    seen: Calls = []

    def leave(_: nn.Module, args: tuple, kwargs: dict) -> None:
        seen.append((args[0], kwargs))
        raise _Reached

    handle = first.register_forward_pre_hook(leave, with_kwargs=True)
    try:
        for part in tokens.split(batch_size):
            with contextlib.suppress(_Reached):
                model(part, use_cache=False)
    finally:
        handle.remove()
    return seen


def _check_tokens(tokens: torch.Tensor, batch_size: int) -> None:
    if tokens.dim() != 2 or not tokens.numel():
        raise ValueError(f"tokens must be [sequences, length], and has shape {list(tokens.shape)}")
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, and is {batch_size}")
