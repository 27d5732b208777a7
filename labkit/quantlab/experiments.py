"""Lab 3's larger experiments. Each takes what the student built, and runs it on the arithmetic model."""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from labkit import device, models
from labkit.models.sums import PROMPT_LENGTH
from labkit.simulate import rank_correlation

JUDGED, CALIBRATION = 10**9, 10**9 + 7  # seeds of exercises; those of training are far below
FACTOR = 16.0  # of planted outliers: a power of two, so that the unquantized model computes the same bits


def planted() -> Any:
    """The trained model with outlier channels among its weights."""
    return models.plant_outliers(models.load_arithmetic(), "weight", FACTOR)


def packed_matrix(
    pack_awq: Callable[[torch.Tensor], torch.Tensor], n: int, k: int, group: int
) -> tuple[torch.Tensor, ...]:
    """Random weights [k, n] in AutoAWQ's tensors on this device: qweight, qzeros, scales."""
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (k, n), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (k // group, n), generator=g, dtype=torch.uint8)
    scales = (0.01 * (1 + torch.rand(k // group, n, generator=g))).half()
    return tuple(t.to(device.name()) for t in (pack_awq(codes), pack_awq(zeros), scales))


@dataclass(frozen=True)
class Checkpoint:
    """A folder that was written, its tensors, and whether the library's reader gives the weights that went in."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    fp16_bytes: int
    alike: bool


def write_checkpoint(awq_layout: Callable[..., tuple[dict, dict]], pack_awq: Callable) -> Checkpoint:
    """The arithmetic model in int4, groups of 128, in a new folder that vLLM can serve. It goes with this process."""
    from safetensors.torch import save_file

    from labkit import quant

    model = models.load_arithmetic()
    made = quant.quantize_rtn(model, quant.Scheme(4, 128, scale_dtype=torch.float16))
    config = {**model.config.to_dict(), "architectures": [type(model).__name__]}
    parts = {name: (q.codes, q.scales, q.zeros) for name, q in made.items()}
    tensors, settings = awq_layout(model.state_dict(), config, parts, pack_awq)
    folder = Path(tempfile.mkdtemp(prefix="lab3_awq_"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
    models.arithmetic_tokenizer().save_pretrained(folder)
    read = quant.read_quantized(folder)
    alike = read.keys() == made.keys() and all(
        torch.equal(read[n].dequantize(), q.dequantize()) for n, q in made.items()
    )
    return Checkpoint(folder, tensors, sum(2 * p.numel() for p in model.parameters()), alike)


@torch.no_grad()
def error_curve(
    propagated_error: Callable[..., dict[str, float]], bits: Iterable[int], group_size: int = 64
) -> dict[str, list[float]]:
    """Relative errors by bits a weight, in the first layer: of weights, K, V, attention, and K of random inputs."""
    from labkit import quant

    model = models.load_arithmetic()
    layer = model.model.layers[0]
    embedded = model.model.embed_tokens(models.make_sums(40, seed=JUDGED).tokens[:, :-1])
    own = layer.input_layernorm(embedded)
    noise = torch.randn(own.shape, generator=torch.Generator().manual_seed(0))
    exact = {name: getattr(layer.self_attn, f"{name}_proj").weight.detach() for name in "qkv"}
    curve: dict[str, list[float]] = {name: [] for name in ("weights", "k", "v", "attention", "k of random inputs")}
    for b in bits:
        rounded = {n: quant.round_trip(w, quant.Scheme(b, group_size)) for n, w in exact.items()}
        curve["weights"].append(((rounded["k"] - exact["k"]).norm() / exact["k"].norm()).item())
        found = [propagated_error(x, exact, rounded, layer.self_attn.head_dim) for x in own]
        for name in ("k", "v", "attention"):
            curve[name].append(float(np.mean([f[name] for f in found])))
        control = [propagated_error(x, exact, rounded, layer.self_attn.head_dim)["k"] for x in noise]
        curve["k of random inputs"].append(float(np.mean(control)))
    return curve


@torch.no_grad()
def cache_experiment(
    kv_round_trip: Callable[[torch.Tensor, int], torch.Tensor],
    bits_by_norm: Callable[[Sequence[float], float, float], list[int]],
    thresholds: tuple[float, float] = (40, 60),
) -> dict[str, Any]:
    """K and V of 300 prompts, each token in bits of its own; what that does to the model's next token.

    thresholds: of the controller, percentiles of the norms. Gives "norm" (least, greatest), "switches", rank
    correlations by what they are of, and "policies": name -> (bits a number with scale and offset, KL in nat).
    """
    from transformers import DynamicCache

    model, ids = models.load_arithmetic(), models.make_sums(300, seed=JUDGED).tokens[:, :PROMPT_LENGTH]
    written = [(layer.keys, layer.values) for layer in model(ids[:, :-1], use_cache=True).past_key_values.layers]
    kv = torch.stack([torch.stack(pair) for pair in written])  # [layers, 2, prompts, heads, tokens, head_dim]
    prompts, tokens, head_dim = len(ids), kv.shape[4], kv.shape[5]
    rows = kv.permute(2, 4, 0, 1, 3, 5).reshape(prompts * tokens, -1, head_dim)  # [all tokens, all heads, head_dim]

    def next_token(flat: torch.Tensor) -> torch.Tensor:
        layers = flat.reshape(prompts, tokens, *kv.shape[:2], kv.shape[3], head_dim).permute(2, 3, 0, 4, 1, 5)
        cache = DynamicCache()
        for n, (keys, values) in enumerate(layers):
            cache.update(keys.contiguous(), values.contiguous(), n)
        return model(ids[:, -1:], past_key_values=cache).logits[:, -1].log_softmax(-1)

    norms, rounded = rows.flatten(1).norm(dim=1), {bits: kv_round_trip(rows, bits) for bits in (4, 6, 8)}
    exact = next_token(rows)

    def damage(flat: torch.Tensor) -> torch.Tensor:
        return (exact.exp() * (exact - next_token(flat))).sum(-1)  # KL of each prompt

    low, high = (float(p) for p in np.percentile(norms, thresholds))
    by_norm = torch.tensor(bits_by_norm(norms.tolist(), high, low))
    coin = by_norm[torch.randperm(len(by_norm), generator=torch.Generator().manual_seed(0))]
    chosen = {f"static int{bits}": torch.full_like(by_norm, bits) for bits in rounded}
    policies = {}
    for name, bits in (chosen | {"by norm": by_norm, "by coin": coin}).items():
        mixed = torch.stack([rounded[b] * (bits == b)[:, None, None] for b in rounded]).sum(0)
        policies[name] = bits.float().mean().item() + 32 / head_dim, damage(mixed).mean().item()
    lost = (rounded[4] - rows).flatten(1).norm(dim=1)
    whole = norms.reshape(prompts, -1).square().sum(1).sqrt()
    return {
        "norm": (norms.min().item(), norms.max().item()),
        "switches": int((by_norm[1:] != by_norm[:-1]).sum()),
        "norm and error of a token": rank_correlation(norms.tolist(), lost.tolist()),
        "norm and relative error of a token": rank_correlation(norms.tolist(), (lost / norms).tolist()),
        "norm of a cache and its damage": rank_correlation(whole.tolist(), damage(rounded[4]).tolist()),
        "policies": policies,
    }


@torch.no_grad()
def shoot_out(stored_bytes: Callable[..., int], prompts: int = 300) -> dict[str, tuple[float, float, float]]:
    """{format: (bits a weight, KL in nat, share of exact answers)}: one model, one set of exercises."""
    from labkit import quant

    judged, calibration = models.make_sums(prompts, seed=JUDGED), models.make_sums(128, seed=CALIBRATION)
    scheme = quant.Scheme(4, 128, scale_dtype=torch.float16)

    def answers(model: Any) -> torch.Tensor:
        return model(judged.tokens[:, :-1]).logits[:, PROMPT_LENGTH - 1 :].log_softmax(-1)

    ways: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
        "fp16": ("fp16", lambda w: w.half().float()),
        "fp8": ("fp8", lambda w: quant.dequantize_fp8(*quant.quantize_fp8(w))),
        "q4_0": ("q4_0", lambda w: quant.quantize_q4_0(w).dequantize()),
        "q4_k": ("q4_k", lambda w: quant.quantize_q4_k(w).dequantize()),
        "awq, scales unsearched": ("awq", lambda w: quant.round_trip(w, scheme)),
        "awq": ("awq", lambda w: quant.round_trip(w, scheme)),
    }
    want, rows = answers(planted()), {}
    for name, (fmt, change) in ways.items():
        model = planted()
        if name == "awq":
            quant.prepare_awq(model, quant.observe_inputs(model, calibration.tokens[:, :-1]), scheme)
        stored = weights = 0
        for linear in quant.linears_of(model).values():
            linear.weight.copy_(change(linear.weight))
            stored, weights = stored + stored_bytes(*linear.weight.shape, fmt), weights + linear.weight.numel()
        kl = (want.exp() * (want - answers(model))).sum(-1).mean().item()
        rows[name] = 8 * stored / weights, kl, models.exact_match(model, judged).float().mean().item()
    return rows


def recover(lora_linear: Callable[..., torch.nn.Module], steps: int = 100, rank: int = 8) -> dict[str, Any]:
    """LoRA on a planted int4 model, trained to agree with the unquantized one on exercises of other seeds.

    Gives "exact" (share of right answers by step), "loss" (KL in nat of each step), "frozen" (whether all codes are
    as they were) and "trained" (number of parameters).
    """
    from labkit import quant

    torch.manual_seed(0)
    teacher, student = planted(), planted().requires_grad_(False)
    for name, linear in quant.linears_of(student).items():
        q = quant.quantize(linear.weight, quant.Scheme(4, quant.PER_CHANNEL))
        owner, _, leaf = name.rpartition(".")
        setattr(student.get_submodule(owner), leaf, lora_linear(q.codes, q.scales, q.zeros, rank, 2.0 * rank))
    trained = [p for p in student.parameters() if p.requires_grad]
    frozen = {n: b.clone() for n, b in student.named_buffers() if n.endswith("codes")}
    optimizer, judged = torch.optim.Adam(trained, lr=3e-3), models.make_sums(300, seed=JUDGED)
    exact, losses = {0: models.exact_match(student, judged).float().mean().item()}, []
    for step in range(1, steps + 1):
        ids = models.make_sums(16, seed=5000 + step).tokens[:, :-1]
        with torch.no_grad():
            want = teacher(ids).logits.log_softmax(-1)
        loss = (want.exp() * (want - student(ids).logits.log_softmax(-1))).sum(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 25 == 0:
            exact[step] = models.exact_match(student, judged).float().mean().item()
    now = dict(student.named_buffers())
    unchanged = all(torch.equal(codes, now[name]) for name, codes in frozen.items())
    return {"exact": exact, "loss": losses, "frozen": unchanged, "trained": sum(p.numel() for p in trained)}
