"""Putting other weights into a model, whoever made them: a student's function is all that is asked for."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def linears(model: nn.Module) -> dict[str, nn.Linear]:
    """The linear layers of the decoder, by name: all but the output head."""
    return {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear) and n != "lm_head"}


@torch.no_grad()
def with_weights(model: Any, change: Callable[[str, torch.Tensor], torch.Tensor]) -> Any:
    """A copy of the model, the weight [out, in] of each linear replaced by change(name, weight)."""
    made = copy.deepcopy(model)
    for name, linear in linears(made).items():
        linear.weight.copy_(change(name, linear.weight.detach().clone()))
    return made


@torch.no_grad()
def linear_inputs(model: nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """What each linear reads when the model runs on tokens [sequences, length]: name -> [tokens, in]."""
    found: dict[str, torch.Tensor] = {}

    def keep(name: str) -> Callable:
        return lambda _, args: found.update({name: args[0].reshape(-1, args[0].shape[-1])})

    handles = [linear.register_forward_pre_hook(keep(name)) for name, linear in linears(model).items()]
    try:
        model(tokens)
    finally:
        for handle in handles:
            handle.remove()
    return found


@torch.no_grad()
def fold_model(model: Any, tokens: torch.Tensor, fold: Callable[..., torch.Tensor]) -> Any:
    """A copy of the model on which `fold(before, weights, inputs)` was called where a norm feeds q, k, v or gate, up.

    And where up feeds down: `before` is the matrix of up then, whose rows write the channels, as [out, in].
    """
    inputs = linear_inputs(model, tokens)
    made = copy.deepcopy(model)
    for i, layer in enumerate(made.model.layers):
        attention, mlp, name = layer.self_attn, layer.mlp, f"model.layers.{i}"
        sites = (
            (layer.input_layernorm, (attention.q_proj, attention.k_proj, attention.v_proj), "self_attn.q_proj"),
            (layer.post_attention_layernorm, (mlp.gate_proj, mlp.up_proj), "mlp.gate_proj"),
            (mlp.up_proj, (mlp.down_proj,), "mlp.down_proj"),
        )
        for before, readers, first in sites:
            fold(before.weight.data, [reader.weight.data for reader in readers], inputs[f"{name}.{first}"])
    return made
