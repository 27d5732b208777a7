"""Finding out what is wrong with a kernel: does it depend on the order of its programs, do its programs race.

docs/debugging.md says which tool finds which fault; most of them are elsewhere: `meter` for accesses out of bounds,
`access_map` for masks and strides, `compiled` for types and machine code, pdb for everything that can be looked at.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch

from labkit.meter import Call, Conflict, measure_many


@dataclass(frozen=True)
class OrderDependence:
    """A tensor that came out differently when programs ran in another order.

    where: "argument 0", "argument `out`" or "result 0". index: of the first element that differs, with its value in the
    interpreter's own order and in the drawn one. seed: draws that order again.
    """

    where: str
    index: tuple[int, ...]
    in_order: float
    shuffled: float
    elements: int
    seed: int

    def __str__(self) -> str:
        return (
            f"{self.where}: {self.elements} elements depend on the order of programs; at {list(self.index)} "
            f"{self.in_order:g} in order, {self.shuffled:g} in the order of seed {self.seed}"
        )


def find_order_dependence(
    call: Call, *, seeds: tuple[int, ...] = (1, 2, 3), rtol: float = 1e-3
) -> OrderDependence | None:
    """Run a call in the interpreter's order of programs and in others; the first tensor that differs, or None.

    rtol: differences below it, relative to the tensor's largest value, are rounding, as atomic sums have it. The call's
    own tensors are left alone.
    """
    expected = _outcome(call, None)
    for seed in seeds:
        for where, value in _outcome(call, seed).items():
            dependence = _difference(where, expected[where], value, seed, rtol)
            if dependence:
                return dependence
    return None


def find_races(call: Call, *, timeout: float = 45.0) -> tuple[Conflict, ...]:
    """Elements that two programs of a launch touch and at least one stores to, of all launches of a call.

    On a GPU nothing orders two programs but atomics, which are not seen through: a kernel that waits for an atomic
    counter before it reads what others wrote is reported, and right. Threads within one program are not looked at. The
    call's own tensors are left alone.
    """
    return measure_many([_copied(call)], conflicts=True, timeout=timeout)[0].conflicts


def _copied(call: Call) -> Call:
    arguments = copy.deepcopy((call.args, call.kwargs))  # tensors that share memory still do
    return Call(call.function, *arguments)


def _outcome(call: Call, seed: int | None) -> dict[str, torch.Tensor]:
    own = _copied(call)
    (count,) = measure_many([own], shuffle=seed)
    results = count.result if isinstance(count.result, (tuple, list)) else (count.result,)
    values: list[tuple[str, Any]] = [(f"argument {n}", value) for n, value in enumerate(own.args)]
    values += [(f"argument `{name}`", value) for name, value in own.kwargs.items()]
    values += [(f"result {n}", value) for n, value in enumerate(results)]
    return {where: value for where, value in values if isinstance(value, torch.Tensor)}


def _difference(
    where: str, expected: torch.Tensor, value: torch.Tensor, seed: int, rtol: float
) -> OrderDependence | None:
    a, b = expected.double(), value.double()
    scale = float(a.nan_to_num(0, 0, 0).abs().max()) if a.numel() else 0.0
    differs = ~torch.isclose(a, b, rtol=0, atol=rtol * scale, equal_nan=True)
    if not differs.any():
        return None
    index = tuple(map(int, differs.nonzero()[0]))
    return OrderDependence(where, index, float(a[index]), float(b[index]), int(differs.sum()), seed)
