"""Linears of an AutoAWQ checkpoint, as the engine takes them: dequantized, or as our kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from kernels.int4_repack import Int4Weight, repack_awq
from labkit.quant.packing import from_awq

PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class AwqLinear:
    """One linear. qweight: [in, out / 8] int32. qzeros: [groups, out / 8] int32. scales: [groups, out]."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """[out, in], as of the matrix that it stands for."""
        return self.qweight.shape[1] * 8, self.qweight.shape[0]

    def dequantized(self) -> torch.Tensor:
        """The matrix [out, in] in float32."""
        return from_awq({name: getattr(self, name) for name in PARTS}).dequantize()


def read_awq(holder: Mapping[str, Any], stem: str, device: torch.device | str) -> AwqLinear:
    """The linear whose tensors' names begin with `stem`; holder: as of labkit.models.tensors.open_tensors."""
    return AwqLinear(*(holder[stem + part].get_tensor(stem + part).to(device) for part in PARTS))


def joined(linears: Sequence[torch.Tensor | AwqLinear], dtype: torch.dtype) -> torch.Tensor | Int4Weight:
    """Linears of the same input side by side: matrices as one, and AwqLinear in the order that kernels.int4_matmul
    streams, whose x must have `dtype`."""
    if isinstance(linears[0], torch.Tensor):
        return torch.cat([t for t in linears if isinstance(t, torch.Tensor)]) if len(linears) > 1 else linears[0]
    qweight, qzeros, scales = (torch.cat([getattr(one, name) for one in linears], 1) for name in PARTS)
    size = qweight.shape[0] // scales.shape[0]
    return repack_awq(qweight, qzeros, scales, group_size=size if scales.shape[0] > 1 else -1, dtype=dtype)
