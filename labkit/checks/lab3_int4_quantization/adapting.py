"""LoRA beside frozen int4 weights."""

from __future__ import annotations

import torch

from labkit import device
from labkit.checks.contract import Question, require
from labkit.checks.lab3_int4_quantization.packing import LAB, SHIPPED
from labkit.checks.values import close

lora_linear = Question("lora_linear", LAB, "int4 weights stay, gradients pass, and the correction learns", SHIPPED)


def base(outputs: int = 24, inputs: int = 32, groups: int = 2, seed: int = 0) -> tuple[torch.Tensor, ...]:
    """(codes, scales, zeros) on the device."""
    g = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 16, (outputs, inputs), generator=g, dtype=torch.uint8)
    zeros = torch.randint(0, 16, (outputs, groups), generator=g, dtype=torch.uint8)
    scales = 0.05 * (0.5 + torch.rand(outputs, groups, generator=g))
    return tuple(t.to(device.name()) for t in (codes, scales, zeros))


def weight_of(codes: torch.Tensor, scales: torch.Tensor, zeros: torch.Tensor) -> torch.Tensor:
    """fp64 [out, in] on the CPU."""
    size = codes.shape[1] // scales.shape[1]
    scale, zero = (t.cpu().double().repeat_interleave(size, 1) for t in (scales, zeros))
    return (codes.cpu().double() - zero) * scale


def _x(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device.name())


@lora_linear.invariant("it starts as the quantized layer")
def _(answer) -> float:
    ratios = []
    for groups, shape in ((2, (5, 32)), (1, (2, 3, 32)), (4, (1, 32))):
        packed, x = base(groups=groups), _x(*shape)
        weight = weight_of(*packed)
        got, peer = answer(*packed, 4, 8.0)(x), x.cpu() @ weight.float().T
        look_at = "B is 0 at first; (code - zero) * scale of the input's group, subtracted in floats"
        ratios.append(close(got, x.cpu().double() @ weight.T, peer * (1 + 1e-6), look_at, "y"))
    return max(ratios)


@lora_linear.invariant("its parameters are A and B, and A is not 0")
def _(answer) -> None:
    made = answer(*base(), 4, 8.0)
    got = {name: tuple(p.shape) for name, p in made.named_parameters()}
    want = {"A": (4, 32), "B": (24, 4)}
    require(got == want, f"the parameters are {got}, {want} expected: int4 weights are buffers, not parameters")
    require(bool((made.A != 0).any()), "A and B are both 0: then neither has a gradient, for ever")


@lora_linear.invariant("the correction, and the gradients of x, A and B", share=2)
def _(answer) -> float:
    packed, x = base(seed=3), _x(6, 32, seed=4).requires_grad_(True)
    made, weight = answer(*packed, 4, 6.0), weight_of(*packed)
    with torch.no_grad():
        made.A.copy_(_x(4, 32, seed=5))
        made.B.copy_(_x(24, 4, seed=6))
    out, push = made(x), _x(6, 24, seed=7)
    out.backward(push)
    gradients = x.grad, made.A.grad, made.B.grad
    require(
        all(g is not None for g in gradients), "x, A or B got no gradient: it passes through W as through any matrix"
    )

    def exact(dtype: torch.dtype) -> list[torch.Tensor]:
        leaves = [t.detach().cpu().to(dtype).requires_grad_(True) for t in (x, made.A, made.B)]
        y = leaves[0] @ (weight.to(dtype) + 1.5 * leaves[2] @ leaves[1]).T
        y.backward(push.cpu().to(dtype))
        return [y.detach(), *(leaf.grad for leaf in leaves)]  # type: ignore[list-item]

    got = [out.detach(), *gradients]
    names = ("y", "the gradient of x", "the gradient of A", "the gradient of B")
    look_at = "y = x W^T + alpha / rank * (x A^T) B^T"
    rows = zip(names, got, exact(torch.float64), exact(torch.float32), strict=True)
    return max(close(g, e, p * (1 + 3e-6), look_at, name) for name, g, e, p in rows)


@lora_linear.invariant("fifty steps lower the loss and leave the codes alone")
def _(answer) -> None:
    torch.manual_seed(0)
    packed, x = base(seed=8), _x(64, 32, seed=9)
    before = [t.clone() for t in packed]
    target = x @ (weight_of(*packed).float().to(x.device) + 0.3 * _x(24, 2, seed=10) @ _x(2, 32, seed=11) / 5).T
    made = answer(*packed, 4, 8.0)
    optimizer = torch.optim.Adam(made.parameters(), lr=0.02)
    losses = []
    for _ in range(50):
        loss = (made(x) - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    require(losses[-1] < 0.1 * losses[0], f"the loss goes from {losses[0]:.3g} to {losses[-1]:.3g} in 50 steps of Adam")
    same = all(torch.equal(a, b) for a, b in zip(before, packed, strict=True))
    require(same, "codes, scales or zeros were changed in training")


QUESTIONS = [lora_linear]
