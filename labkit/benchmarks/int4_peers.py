"""What the int4 matrix product races against: the same weights in 16 bits, and vLLM's Marlin and Machete kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from kernels.int4_repack import unpack_awq


@dataclass(frozen=True)
class Weights:
    """A weight matrix. qweight, qzeros, scales: as kernels.int4_repack.repack_awq takes them. dtype: of activations."""

    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    group_size: int
    dtype: torch.dtype

    @property
    def k(self) -> int:
        return self.qweight.shape[0]

    @property
    def n(self) -> int:
        return self.scales.shape[1]


Product = Callable[[torch.Tensor], torch.Tensor]  # x [m, k] to [m, n]
Peer = Callable[[Weights], Product]


def bf16(w: Weights) -> Product:
    """cuBLAS on the weights in 16 bits."""
    from kernels.int4_matmul import dequantized
    from kernels.int4_repack import repack_awq

    weight = dequantized(repack_awq(w.qweight, w.qzeros, w.scales, group_size=w.group_size, dtype=w.dtype))
    return functools.partial(F.linear, weight=weight)


def marlin() -> Peer | None:
    """Marlin (Frantar et al., arXiv:2408.11743) with zero points, as vLLM calls it; None where there is no vLLM."""
    ops = _vllm_ops("marlin_gemm")
    if ops is None:
        return None
    from vllm.scalar_type import scalar_types

    def bind(w: Weights) -> Product:
        device = w.qweight.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        columns = torch.tensor([i + 8 * j for i in range(8) for j in range(8)], device=device)
        zeros = unpack_awq(w.qzeros).view(-1, 64)[:, columns].view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].to(torch.int32)
        packed = sum(zeros[:, i] << 4 * i for i in range(8))
        assert isinstance(packed, torch.Tensor)
        scales = w.scales.to(w.dtype).view(-1, 64)[:, columns].reshape(w.scales.shape)
        weight, zeros = ops.awq_marlin_repack(w.qweight, w.k, w.n, 4), packed.view(w.qzeros.shape)
        locks = torch.zeros(sms, dtype=torch.int32, device=device)
        return lambda x: ops.marlin_gemm(
            x, None, weight, None, scales, None, None, zeros, None, None, locks, scalar_types.uint4,
            size_m=x.shape[0], size_n=w.n, size_k=w.k, use_fp32_reduce=True,
        )  # fmt: skip

    return bind


def machete() -> Peer | None:
    """Machete, vLLM's CUTLASS kernel for Hopper; None where vLLM is not installed or the GPU is another."""
    ops = _vllm_ops("machete_mm")
    if ops is None or torch.cuda.get_device_capability()[0] != 9:
        return None
    from vllm.scalar_type import scalar_types

    def bind(w: Weights) -> Product:
        codes = unpack_awq(w.qweight).view(w.k // 8, 8, w.n).to(torch.int32)
        packed = sum(codes[:, i] << 4 * i for i in range(8))
        assert isinstance(packed, torch.Tensor)
        scales = w.scales.to(w.dtype)
        weight = ops.machete_prepack_B(
            packed.t().contiguous().t(), a_type=w.dtype, b_type=scalar_types.uint4, group_scales_type=w.dtype
        )
        zeros = -scales * unpack_awq(w.qzeros).to(scales.dtype)
        return lambda x: ops.machete_mm(
            x, weight, scalar_types.uint4, b_group_scales=scales, b_group_zeros=zeros, b_group_size=w.group_size
        )

    return bind


def _vllm_ops(name: str) -> Any:
    """vLLM's kernels, None where it is not installed or was built without the one of this name."""
    try:
        from vllm import _custom_ops as ops
    except ImportError:
        return None
    return ops if hasattr(torch.ops._C, name) else None
