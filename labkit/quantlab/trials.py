"""Claims on trial about formats: what was measured becomes a verdict."""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Sequence
from typing import Any

import torch

from labkit.quantlab import illusions
from labkit.quantlab.experiments import Checkpoint
from labkit.trials import Trial

FORMATS_AT = (1, 16, 512, 2048)  # rows of a product


def damping_in_gptq(dampings: Sequence[float]) -> list[float]:
    """How far GPTQ's weights are from plain rounding, by damping: a large one leaves nothing of GPTQ."""
    from labkit import quant

    weight, loudness = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 3, 64)
    x = torch.randn(500, 64, generator=torch.Generator().manual_seed(1)) * loudness
    scheme, hessian = quant.Scheme(3, 64), x.T @ x / len(x)
    plain = quant.round_trip(weight, scheme)
    made = (quant.gptq_weight(weight, hessian, scheme, damping=d).dequantize() for d in dampings)
    return [math.dist(w.flatten().tolist(), plain.flatten().tolist()) for w in made]


def awq_settings(checkpoint: Checkpoint) -> Trial:
    """Do AWQ's configuration, or the weights that are read, know desc_act and damping? Does GPTQ?"""
    import transformers

    from labkit import quant

    names: dict[str, Any] = {"desc_act": True, "damp_percent": 0.5}
    file = checkpoint.folder / "config.json"
    before = {name: q.dequantize() for name, q in quant.read_quantized(checkpoint.folder).items()}
    plain = file.read_text(encoding="utf-8")
    settings = json.loads(plain)
    settings["quantization_config"] |= names
    file.write_text(json.dumps(settings), encoding="utf-8")
    after = {name: q.dequantize() for name, q in quant.read_quantized(checkpoint.folder).items()}
    file.write_text(plain, encoding="utf-8")
    changed = sum(not torch.equal(after[name], weight) for name, weight in before.items())
    kinds = {"AWQ": transformers.AwqConfig, "GPTQ": transformers.GPTQConfig}
    known = {kind: [n for n in names if n in inspect.signature(c).parameters] for kind, c in kinds.items()}
    told = "; ".join(f"{kind}: {', '.join(found) or 'neither'}" for kind, found in known.items())
    near, far = damping_in_gptq((0.01, 1e4))
    return Trial(
        "desc_act and damping are settings of AWQ",
        "transformers' configurations; both written into your AWQ checkpoint; damping 0.01 and 10,000 in GPTQ",
        "AWQ knows them, and other weights with them",
        f"{told}; {changed} of {len(before)} AWQ matrices differ; GPTQ's distance to plain rounding goes from "
        f"{near:.2f} to {far:.2f}",
        changed > 0 or len(known["AWQ"]) == len(names),
    )


def formats(
    shot: dict[str, tuple[float, float, float]], caches: dict[str, Any], recovery: dict[str, Any]
) -> list[Trial]:
    """FP8 against int4, the switched cache, LoRA, E4M3's range. shot, caches, recovery: as `experiments` give them."""
    first = {m: illusions.floor_us(m, "fp8") < illusions.floor_us(m, "int4, groups of 128") for m in FORMATS_AT}
    told = ", ".join(f"M {m}: {'FP8' if fp8 else 'int4'}" for m, fp8 in first.items())
    closer = shot["fp8"][1] < shot["awq"][1]
    four, by_norm, coin = (caches["policies"][name] for name in ("static int4", "by norm", "by coin"))
    start, end = recovery["exact"][0], recovery["exact"][max(recovery["exact"])]
    loud = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1000
    scaled, bare = (illusions.fp8_error(loud, with_scale) for with_scale in (True, False))
    always, never = all(first.values()), not any(first.values()) and not closer
    return [
        Trial("FP8 always beats int4", "least time of a product, H200", "FP8 first at each M", told, always),
        Trial("FP8 never beats int4", "the same, and KL on the same weights", "int4 first in all of it",
              f"{told}; the smaller KL has {'FP8' if closer else 'int4'}", never),
        Trial("a cache of int4 and int6, switched by its norm, improves coherence by 22 %",
              "KL against static int4, and a coin with as many bits",
              "22 % less KL than int4, and than the coin's: from the norm and not from the bits",
              f"{1 - by_norm[1] / four[1]:.0%} less than int4, for {by_norm[0] - four[0]:.2f} bits more; by a coin "
              f"{1 - coin[1] / four[1]:.0%} less", by_norm[1] <= 0.78 * min(four[1], coin[1])),
        Trial("100 steps of LoRA cannot bring an int4 model back", "exact answers, before and after",
              "less than half of the loss made good", f"{start:.1%}, then {end:.1%}", end < (1 + start) / 2),
        Trial("values overflow in E4M3", "N(0, 1000), with a scale as every engine has one", "an error above 10 %",
              f"{scaled:.1%}; without one {bare:.1%}", scaled > 0.1),
    ]  # fmt: skip
