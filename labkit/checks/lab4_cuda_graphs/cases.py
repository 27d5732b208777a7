"""What the checks of this lab share: a capture that counts, on whatever device is here."""

from __future__ import annotations

from collections.abc import Callable

import torch

from labkit import device
from labkit.checks.contract import Failed
from labkit.engine.graphs import Capture, CudaRecorder
from labkit.graph_simulator import Graph, Step, simulated_capture


def capture_here() -> Capture:
    """CUDA graphs where there is a GPU, the simulator elsewhere."""
    return CudaRecorder() if device.tier() == "cuda" else simulated_capture


class CountedCapture:
    """Captures, and counts what happens to what it captured. calls: of the step's function, whoever makes them."""

    def __init__(self) -> None:
        self._capture = capture_here()
        self.captures = self.replays = 0

    def __call__(self, step: Step) -> Graph:
        graph = self._capture(step)
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            graph.replay()

        return Graph(replay, graph.outputs)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal numbers on the device of this machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device.name())


def refused(action: Callable[[], object], named: str, what: str) -> None:
    """Require a ValueError whose text has `named` in it."""
    try:
        got = action()
    except ValueError as error:
        if named not in str(error):
            raise Failed(f"{what}: the ValueError does not name {named!r}: {error}") from None
        return
    raise Failed(f"{what} must raise ValueError, but gave {str(got)[:80]}")
