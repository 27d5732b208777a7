"""Hidden checks of lab 3, second half: errors on their way, the cache, formats, LoRA.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import random

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from labkit.checks import compare
from labkit.checks.lab3_int4_quantization import adapting, caching, formats, packing, propagating

LAB = packing.LAB


def travelled(x, q, k, v, q2, k2, v2, head_dim: int) -> dict:
    """Driver: propagated_error of weights given one by one."""
    import torch

    x, *ws = (torch.from_numpy(t).to(labkit.device.name()) for t in (x, q, k, v, q2, k2, v2))
    return {
        n: float(e)
        for n, e in propagated_error(
            x, dict(zip("qkv", ws[:3], strict=True)), dict(zip("qkv", ws[3:], strict=True)), head_dim
        ).items()
    }


@hidden_check(LAB, "propagated_error")
def other_heads(remote: Remote) -> None:
    for heads, kv_heads, head_dim, share in ((3, 1, 8, 0.3), (8, 2, 4, 0.1), (2, 2, 32, 1.0)):
        x = 2 * torch.randn(9, 24, generator=torch.Generator().manual_seed(heads))
        exact = propagating.weights(heads, kv_heads, head_dim, 24, seed=40 + heads)
        rounded = propagating.disturbed(exact, share, seed=41)
        sent = [w.cpu().numpy() for made in (exact, rounded) for w in made.values()]
        got = remote.call(travelled, x.numpy(), *sent, head_dim)
        want = propagating.expected(x, exact, rounded, head_dim)
        for name, error in want.items():
            near = name in got and abs(got[name] - error) <= 1e-4 * error + 1e-6
            require(near, f"{heads} heads on {kv_heads} of {head_dim}: {name} is {got.get(name)}, {error:.6g} expected")


def cached(x: np.ndarray, bits: int) -> np.ndarray:
    """Driver: kv_round_trip."""
    import torch

    return kv_round_trip(torch.from_numpy(x).to(labkit.device.name()), bits)


@hidden_check(LAB, "kv_round_trip")
def random_rows(remote: Remote) -> None:
    for bits, shift, seed in ((4, 0.0, 51), (6, 5.0, 52), (3, -40.0, 53), (8, 100.0, 54)):
        g = torch.Generator().manual_seed(seed)
        x = (torch.randn(7, 2, 24, generator=g) + shift) * torch.rand(7, 2, 1, generator=g)
        share = caching.wrong_share(torch.from_numpy(remote.call(cached, x.numpy(), bits)), x, bits)
        require(share == 0, f"{bits} bits, numbers about {shift}: {share:.1%} are not on their grid")


@hidden_check(LAB, "bits_by_norm")
def random_walks(remote: Remote) -> None:
    rng = random.Random(55)
    for _ in range(4):
        norm, norms = 50.0, []
        for _ in range(150):
            norm += rng.uniform(-15, 15)
            norms.append(round(norm))
        low = rng.randint(30, 50)
        high = low + rng.choice([0, 5, 40])
        got = remote.call("bits_by_norm", norms, high, low)
        require(got == caching.controlled(norms, high, low), f"a random walk, high {high}, low {low}: other bits")


@hidden_check(LAB, "stored_bytes")
def random_sizes(remote: Remote) -> None:
    rng = random.Random(56)
    for _ in range(12):
        outputs, inputs = 8 * rng.randint(1, 400), 256 * rng.randint(1, 40)
        for fmt in ("fp16", "fp8", "awq", "q4_0", "q4_k"):
            group = rng.choice([32, 64, 128, 256, -1])
            got, want = (
                remote.call("stored_bytes", outputs, inputs, fmt, group),
                formats.expected(outputs, inputs, fmt, group),
            )
            require(got == want, f"{fmt} of {outputs} x {inputs}, groups of {group}: {got} bytes, {want} expected")


def adapted(codes, scales, zeros, x, a, b, alpha: float) -> tuple:
    """Driver: output and gradient of x of a LoraLinear with these A and B."""
    import torch

    codes, scales, zeros, x, a, b = (
        torch.from_numpy(t).to(labkit.device.name()) for t in (codes, scales, zeros, x, a, b)
    )
    made = LoraLinear(codes, scales, zeros, len(a), alpha)
    with torch.no_grad():
        made.A.copy_(a)
        made.B.copy_(b)
    x.requires_grad_(True)
    y = made(x)
    y.square().sum().backward()
    return y.detach(), x.grad, [name for name, _ in made.named_parameters()]


def squares(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """y = x W^T, and the gradient of its sum of squares to x."""
    y = x @ weight.T
    return y, 2 * y @ weight


@hidden_check(LAB, "lora_linear")
def another_layer(remote: Remote) -> None:
    g = torch.Generator().manual_seed(57)
    for outputs, inputs, groups, rank, alpha in ((8, 48, 3, 2, 1.0), (40, 16, 1, 5, 20.0)):
        base = adapting.base(outputs, inputs, groups, seed=outputs)
        x, a, b = (torch.randn(*s, generator=g) for s in ((7, inputs), (rank, inputs), (outputs, rank)))
        sent = [t.cpu().numpy() for t in (*base, x, a, b)]
        y, gradient, names = remote.call(adapted, *sent, alpha)
        require(sorted(names) == ["A", "B"], f"the parameters are {names}")

        whole = adapting.weight_of(*base) + alpha / rank * b.double() @ a.double()
        for name, got, want, peer in zip(
            ("y", "the gradient of x"),
            (y, gradient),
            squares(x.double(), whole),
            squares(x, whole.float()),
            strict=True,
        ):
            compare.close(got, want, peer * (1 + 3e-6), name)
