"""What the checks of this lab share: a capture that counts, on whatever device is here."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator

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


@contextlib.contextmanager
def within(seconds: float, what: str) -> Iterator[None]:
    """Failed with `what` if the answer runs longer than this: a search without an end would take the notebook along.

    Only where an alarm can ring: in a main thread, on Unix. Elsewhere there is no limit.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return

    def ring(*_: object) -> None:
        raise Failed(f"no answer within {seconds:g} s: {what}")

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
