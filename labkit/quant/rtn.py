"""Round a whole model to nearest (RTN), in place: its weights become what their codes dequantize to, and it still runs.

What its weights go through before is left to the caller: nothing, a clamp, or the preparation of `awq`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from labkit.quant.grid import Quantized, Scheme, quantize
from labkit.quant.inputs import linears_of


@torch.no_grad()
def quantize_rtn(
    model: nn.Module, scheme: Scheme, change: Callable[[str, torch.Tensor], torch.Tensor] | None = None
) -> dict[str, Quantized]:
    """Round the weights of every linear but the output head to their grids; gives the quantized matrices by name.

    change: what is done before to the weight of the linear of this name, such as a clamp or a clip search. ValueError
    names the first weight that the scheme does not fit, and leaves the model as it was.
    """
    made, linears = {}, linears_of(model)
    for name, linear in linears.items():
        weight = linear.weight if change is None else change(name, linear.weight)
        made[name] = quantize(weight, scheme, name=f"{name}.weight")
    put_back(linears, made)
    return made


@torch.no_grad()
def put_back(linears: dict[str, nn.Linear], made: dict[str, Quantized]) -> None:
    """Give each linear the weight that its quantized matrix dequantizes to."""
    for name, quantized in made.items():
        linears[name].weight.copy_(quantized.dequantize())
