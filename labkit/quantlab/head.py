"""The weights of one attention head of SmolLM2-135M (HuggingFaceTB, Apache-2.0) and what it reads, as they ship.

It is the first of the three key heads of layer 11. Under a clamp at three sigma its weight error falls and its output
error rises, in int4 per channel, as in 80 of the model's 90 key heads; it is among the clearer cases.
`python -m labkit.quantlab.take_head` makes the file anew.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

FILE = Path(__file__).with_name("data") / "smollm2_head.safetensors"


@dataclass(frozen=True)
class Head:
    """weight: [64, 576], of k_proj. calibration, evaluation: [tokens, 576], what it reads on two books. All fp32."""

    weight: torch.Tensor
    calibration: torch.Tensor
    evaluation: torch.Tensor

    def weight_error(self, rounded: torch.Tensor) -> float:
        """Mean square of the change of the weights, over that of the weights."""
        return ((rounded - self.weight).square().sum() / self.weight.square().sum()).item()

    def output_error(self, rounded: torch.Tensor) -> float:
        """Mean square of the change of the outputs on the evaluation text, over that of the outputs."""
        x = self.evaluation
        return ((x @ (rounded - self.weight).T).square().sum() / (x @ self.weight.T).square().sum()).item()


def load_head() -> Head:
    """The head that ships."""
    from safetensors.torch import load_file

    return Head(**{name: tensor.float() for name, tensor in load_file(FILE).items()})
