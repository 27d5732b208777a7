"""The error of rounded weights in K, V and the output of attention."""

from __future__ import annotations

import torch

from labkit import device
from labkit.checks.contract import Question, require
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED

propagated_error = Question(
    "propagated_error", LAB, "errors of K, V and attention are those of a computation with rounded weights", SHIPPED
)

Weights = dict[str, torch.Tensor]
NAMES = ("k", "v", "attention")


def weights(heads: int, kv_heads: int, head_dim: int, hidden: int, seed: int) -> Weights:
    """Random projections, fp32, on the device."""
    g = torch.Generator().manual_seed(seed)
    rows = {"q": heads * head_dim, "k": kv_heads * head_dim, "v": kv_heads * head_dim}
    made = {name: torch.randn(n, hidden, generator=g) / hidden**0.5 for name, n in rows.items()}
    return {name: w.to(device.name()) for name, w in made.items()}


def disturbed(exact: Weights, share: float, seed: int, only: str = "qkv") -> Weights:
    """The weights with noise of this share of their size on some of them."""
    g = torch.Generator().manual_seed(seed)
    noise = {name: torch.randn(w.shape, generator=g).to(w.device) * w.std() * share for name, w in exact.items()}
    return {name: w + noise[name] if name in only else w.clone() for name, w in exact.items()}


def outputs(x: torch.Tensor, made: Weights, head_dim: int) -> dict[str, torch.Tensor]:
    """The oracle, fp64 on the CPU, head by head."""
    host = x.cpu().double()
    q, k, v = ((host @ made[n].cpu().double().T).unflatten(1, (-1, head_dim)) for n in "qkv")
    found = []
    for head in range(q.shape[1]):
        shared = head // (q.shape[1] // k.shape[1])
        scores = q[:, head] @ k[:, shared].T / head_dim**0.5
        later = torch.ones_like(scores, dtype=torch.bool).triu(1)
        found.append(scores.masked_fill(later, -torch.inf).softmax(-1) @ v[:, shared])
    return {"k": k, "v": v, "attention": torch.stack(found, 1)}


def expected(x: torch.Tensor, exact: Weights, rounded: Weights, head_dim: int) -> dict[str, float]:
    """Relative errors by name."""
    a, b = outputs(x, exact, head_dim), outputs(x, rounded, head_dim)
    return {name: ((b[name] - a[name]).norm() / a[name].norm()).item() for name in NAMES}


def _agrees(
    answer, heads: int, kv_heads: int, share: float, look_at: str, only: str = "qkv", loud: float = 1.0
) -> None:
    g = torch.Generator().manual_seed(heads)
    x = (loud * torch.randn(12, 32, generator=g)).to(device.name())
    exact = weights(heads, kv_heads, 16, 32, seed=heads + kv_heads)
    rounded = disturbed(exact, share, 7, only)
    got, want = answer(x, exact, rounded, 16), expected(x, exact, rounded, 16)
    require(isinstance(got, dict) and set(got) == set(NAMES), f"a dictionary of {', '.join(NAMES)} was expected")
    for name in NAMES:
        close = abs(float(got[name]) - want[name]) <= 1e-4 * want[name] + 1e-6
        require(close, f"{heads} heads on {kv_heads}: {name} is {got[name]:.6g}, {want[name]:.6g} expected: {look_at}")


@propagated_error.invariant("K and V, exact where their weights are")
def _(answer) -> None:
    look_at = "the norm of the difference over the norm of the exact one, over all elements"
    _agrees(answer, 1, 1, 0.1, look_at, only="k")
    _agrees(answer, 1, 1, 1.5, look_at, only="v")


@propagated_error.invariant("attention with all three rounded", share=2)
def _(answer) -> None:
    for share in (0.05, 0.5):
        _agrees(
            answer, 2, 2, share, "causal, scores over sqrt(head_dim), rounded q, k and v against exact ones", loud=3.0
        )


@propagated_error.invariant("grouped heads")
def _(answer) -> None:
    for heads, kv_heads in ((4, 2), (6, 3), (4, 1)):
        look_at = "query head h reads KV head h // (heads / kv_heads): neighbours share one"
        _agrees(answer, heads, kv_heads, 0.2, look_at, loud=3.0)


@propagated_error.invariant("equal weights have no error")
def _(answer) -> None:
    _agrees(answer, 2, 1, 0.0, "nothing was rounded")


QUESTIONS = [propagated_error]
