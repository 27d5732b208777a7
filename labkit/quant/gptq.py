"""GPTQ: quantize column by column, and let the columns to come make up for the error so far (arXiv 2210.17323).

Each layer is quantized with the inputs that the quantized layers before it give, as the paper's released code does:
a later layer can then also correct what an earlier one got wrong.
"""

from __future__ import annotations

import torch
from torch import nn
from tqdm import tqdm

from labkit.quant.clip import search_clip
from labkit.quant.grid import PER_TENSOR, Quantized, Scheme, encode, quantize
from labkit.quant.inputs import Calls, decoder_layers, layer_calls, linears_of, site_inputs, sites_of
from labkit.quant.rtn import put_back

BLOCK = 128  # columns whose error is handed on at once: a matrix product instead of many thin ones


@torch.no_grad()
def gptq_weight(
    weight: torch.Tensor,
    hessian: torch.Tensor,
    scheme: Scheme,
    *,
    damping: float = 0.01,
    by_loudness: bool = True,
    clip: bool = False,
    name: str = "weight",
) -> Quantized:
    """`weight` [out, in] quantized so that the output changes little, each column's error made good by later ones.

    hessian: mean of x x^T over the inputs, [in, in]. damping: share of its mean diagonal that is added to the diagonal,
    without which few inputs make it singular. by_loudness: the columns of the loudest inputs come first, while many are
    left to make up for them (`desc_act` in checkpoints); else they come as they lie. The grids are those of the weights
    as they were, so that columns of a group can come at different times (`static_groups`). clip: of the weights as a
    clip search cuts them off. ValueError for arguments that do not fit.
    """
    width = weight.shape[-1]
    if scheme.group_size == PER_TENSOR:
        raise ValueError("scheme.group_size must be a group or PER_CHANNEL: GPTQ fixes a grid for each row")
    if hessian.shape != (width, width):
        raise ValueError(f"hessian must be [{width}, {width}], the inputs of {name}, and is {list(hessian.shape)}")
    if not damping > 0:
        raise ValueError(f"damping must be positive, and is {damping}")
    plain = quantize(search_clip(weight, scheme, hessian) if clip else weight, scheme, name=name)
    order = hessian.diagonal().argsort(descending=True, stable=True) if by_loudness else torch.arange(width)
    order = order.to(weight.device)
    size = width if scheme.group_size < 0 else scheme.group_size
    rest = weight.float()[:, order]  # a copy, which shrinks from the left
    factor = _inverse_factor(hessian[order][:, order], damping)
    scales, zeros = plain.scales[:, order // size], plain.zeros[:, order // size]
    codes = torch.empty_like(plain.codes)
    for start in range(0, width, BLOCK):
        end = min(start + BLOCK, width)
        errors = rest.new_zeros(len(rest), end - start)
        for column in range(start, end):
            grid = scales[:, column], zeros[:, column]
            code = encode(rest[:, column, None], *grid, scheme)[:, 0]
            kept = (code.float() - grid[1].float()) * grid[0].float()
            error = (rest[:, column] - kept) / factor[column, column]
            rest[:, column + 1 : end] -= error[:, None] * factor[column, column + 1 : end]
            codes[:, order[column]], errors[:, column - start] = code, error
        rest[:, end:] -= errors @ factor[start:end, end:]
    return Quantized(codes, plain.scales, plain.zeros, scheme)


def _inverse_factor(hessian: torch.Tensor, damping: float) -> torch.Tensor:
    """Upper Cholesky factor of the inverse of the damped Hessian, fp32. ValueError for one that is no Hessian."""
    damped = hessian.double()
    mean = damped.diagonal().mean()
    # All inputs 0: nothing can be lost, and any Hessian will do.
    damped = damped + torch.eye(len(damped), device=damped.device) * (damping * mean if mean > 0 else 1.0)
    try:
        inverse = torch.cholesky_inverse(torch.linalg.cholesky(damped))
        return torch.linalg.cholesky(inverse, upper=True).float()
    except torch.linalg.LinAlgError:
        raise ValueError("hessian must be the mean of x x^T: it is not positive, even damped") from None


@torch.no_grad()
def quantize_gptq(
    model: nn.Module,
    tokens: torch.Tensor,
    scheme: Scheme,
    *,
    damping: float = 0.01,
    by_loudness: bool = True,
    clip: bool = False,
    batch_size: int = 4,
    progress: bool = False,
) -> dict[str, Quantized]:
    """Quantize the linears of `model` in place, site by site, each with the inputs that those before it now give.

    tokens: calibration text, [sequences, length] int64. The other arguments are those of `gptq_weight`. Gives the
    quantized matrices by name; the model's weights become what they dequantize to.
    """
    for name, linear in linears_of(model).items():
        scheme.grouped(linear.weight, f"{name}.weight")  # refuses what does not fit while the model is whole
    calls = list(layer_calls(model, tokens, batch_size))
    made: dict[str, Quantized] = {}
    for name, layer in tqdm(decoder_layers(model), desc="GPTQ", disable=not progress):
        for site in sites_of(name, layer):
            read = site_inputs(site, layer, calls)
            linears = dict(zip(site.names, site.linears, strict=True))
            for linear_name, linear in linears.items():
                made[linear_name] = gptq_weight(
                    linear.weight,
                    read.hessian,
                    scheme,
                    damping=damping,
                    by_loudness=by_loudness,
                    clip=clip,
                    name=linear_name,
                )
            put_back(linears, {linear_name: made[linear_name] for linear_name in linears})
        calls = _run(layer, calls)
    return made


def _run(layer: nn.Module, calls: Calls) -> Calls:
    """Run a decoder layer; gives the calls of the next one."""
    outputs = [(layer(hidden, **kwargs), kwargs) for hidden, kwargs in calls]
    return [(out[0] if isinstance(out, tuple) else out, kwargs) for out, kwargs in outputs]
