"""AWQ: scale salient input channels up before quantization, and what writes them down by as much (arXiv 2306.00978).

The scaled model computes the same; after quantization, channels that meet large inputs have lost less. The reference
implementation runs a whole block for each candidate; here the error is tr(dW H dW^T) with H = mean x x^T, gathered
once, so that a candidate costs one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn
from tqdm import tqdm

from labkit.quant.clip import output_error, search_clip
from labkit.quant.grid import Scheme, round_trip
from labkit.quant.inputs import Inputs, Site, decoder_layers, sites_of

CANDIDATES = 20
NOT_CLIPPED = ("q_proj", "k_proj")  # a clip there is judged by q k^T, which one layer's output error does not show


def search_scales(
    weight: torch.Tensor,
    inputs: Inputs,
    scheme: Scheme,
    *,
    writer: torch.Tensor | None = None,
    candidates: int = CANDIDATES,
) -> torch.Tensor:
    """The scale of each input channel that loses least of the output, or ones where no candidate is better. [in], fp32.

    weight: [out, in], of all linears that read these inputs. writer: [in] int64; inputs of one writer get one scale,
    each its own by default. Candidates: mean|x|^r / mean|w|^(1-r), for r in [0, 1), with |w| relative to the largest of
    its group. ValueError for an argument that does not fit.
    """
    width = weight.shape[-1]
    if inputs.hessian.shape != (width, width):
        raise ValueError(f"inputs must be of [{width}, {width}], as weight has {width}: {list(inputs.hessian.shape)}")
    if candidates < 1:
        raise ValueError(f"candidates must be at least 1, and is {candidates}")
    weight = weight.float()
    writer = torch.arange(width, device=weight.device) if writer is None else writer
    groups = scheme.grouped(weight).abs()
    relative = _mean_by(writer, (groups / (groups.amax(-1, keepdim=True) + 1e-6)).reshape(weight.shape).mean(0))
    loudness = _mean_by(writer, inputs.mean_abs)
    best = torch.ones(width, device=weight.device)
    least = output_error(round_trip(weight, scheme) - weight, inputs.hessian)
    for i in range(candidates):
        ratio = i / candidates
        scales = (loudness**ratio / (relative ** (1 - ratio) + 1e-4)).clamp(min=1e-4)
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = output_error(round_trip(weight * scales, scheme) / scales - weight, inputs.hessian)
        if error < least:
            best, least = scales, error
    return best


def _mean_by(writer: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Each value replaced by the mean of those with the same writer."""
    zeros = torch.zeros(int(writer.max()) + 1, device=values.device)
    sums, counts = zeros.index_add(0, writer, values), zeros.index_add(0, writer, torch.ones_like(values))
    return (sums / counts)[writer]


@torch.no_grad()
def scale_site(site: Site, scales: torch.Tensor) -> None:
    """Multiply the columns of a site's linears by `scales` [in], and divide what writes them; the model stays the same.

    ValueError unless the scales are positive and finite, and alike for inputs of one writer.
    """
    if not bool((torch.isfinite(scales) & (scales > 0)).all()):
        raise ValueError(f"scales of {site.names[0]} must be positive and finite")
    written = scales.new_ones(int(site.writer.max()) + 1)
    written[site.writer] = scales
    if not torch.equal(written[site.writer], scales):
        raise ValueError(f"scales of {site.names[0]} must be alike for inputs that come from one output")
    for linear in site.linears:
        linear.weight *= scales.to(linear.weight.dtype)
    for parameter in (site.before.weight, getattr(site.before, "bias", None)):
        if isinstance(parameter, torch.Tensor):
            parameter /= written.to(parameter.dtype).reshape(-1, *[1] * (parameter.dim() - 1))


@torch.no_grad()
def prepare_awq(
    model: nn.Module,
    inputs: Mapping[str, Inputs],
    scheme: Scheme,
    *,
    scale: bool = True,
    clip: bool = True,
    progress: bool = False,
) -> dict[str, torch.Tensor]:
    """Scale and clip the weights of `model`, in place, so that `scheme` then loses less; gives the scales found.

    inputs: from `observe_inputs` on the unscaled model. scale, clip: leave one out to see what each is worth. Gives,
    by the name of each linear, the scales [in] that its columns were multiplied by. ValueError, with the model as it
    was, where inputs lack a linear.
    """
    sites = [site for named in decoder_layers(model) for site in sites_of(*named)]
    missing = [name for site in sites for name in site.names if name not in inputs]
    if missing:
        raise ValueError(f"inputs lacks {missing[0]}: observe_inputs of this model gives them all")
    found: dict[str, torch.Tensor] = {}
    for site in tqdm(sites, desc="AWQ", disable=not progress):
        read = inputs[site.names[0]]
        scales = torch.ones_like(read.mean_abs)
        if scale:
            weight = torch.cat([linear.weight for linear in site.linears])
            scales = search_scales(weight, read, scheme, writer=site.writer)
            scale_site(site, scales)
        found |= dict.fromkeys(site.names, scales)
        for name, linear in zip(site.names, site.linears, strict=True):
            if clip and not name.endswith(NOT_CLIPPED):
                linear.weight.copy_(search_clip(linear.weight, scheme, read.scaled(scales).hessian))
    return found
