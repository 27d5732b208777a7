"""What the int4 matrix product races against: the same weights in 16 bits, and vLLM's Marlin and Machete kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from kernels.int4_repack import unpack_awq


@dataclass(frozen=True)
class Inputs:
    """One input set. x: [m, k]. qweight, qzeros, scales: as kernels.int4_repack.repack_awq takes them."""

    x: torch.Tensor
    qweight: torch.Tensor
    qzeros: torch.Tensor
    scales: torch.Tensor
    group_size: int

    @property
    def k(self) -> int:
        return self.qweight.shape[0]

    @property
    def n(self) -> int:
        return self.scales.shape[1]


Call = Callable[[], torch.Tensor]
Peer = Callable[[Inputs], Call]


def bf16(x: Inputs) -> Call:
    """cuBLAS on the weights in 16 bits."""
    from kernels.int4_matmul import dequantized
    from kernels.int4_repack import repack_awq

    weight = dequantized(repack_awq(x.qweight, x.qzeros, x.scales, group_size=x.group_size, dtype=x.x.dtype))
    return functools.partial(F.linear, x.x, weight)


def marlin() -> Peer | None:
    """Marlin (Frantar et al., arXiv:2408.11743) with zero points, as vLLM calls it; None where there is no vLLM."""
    try:
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types
    except ImportError:
        return None

    def bind(x: Inputs) -> Call:
        device = x.x.device
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        columns = torch.tensor([i + 8 * j for i in range(8) for j in range(8)], device=device)
        zeros = unpack_awq(x.qzeros).view(-1, 64)[:, columns].view(-1, 8)[:, [0, 2, 4, 6, 1, 3, 5, 7]].to(torch.int32)
        packed = sum(zeros[:, i] << 4 * i for i in range(8))
        assert isinstance(packed, torch.Tensor)
        scales = x.scales.to(x.x.dtype).view(-1, 64)[:, columns].reshape(x.scales.shape)
        return functools.partial(
            ops.marlin_gemm, x.x, None, ops.awq_marlin_repack(x.qweight, x.k, x.n, 4), None, scales, None, None,
            packed.view(x.qzeros.shape), None, None, torch.zeros(sms, dtype=torch.int32, device=device),
            scalar_types.uint4, size_m=x.x.shape[0], size_n=x.n, size_k=x.k, use_fp32_reduce=True,
        )  # fmt: skip

    return bind


def machete() -> Peer | None:
    """Machete, vLLM's CUTLASS kernel for Hopper; None where vLLM is not installed or the GPU is another."""
    try:
        from vllm import _custom_ops as ops
        from vllm.scalar_type import scalar_types
    except ImportError:
        return None
    if torch.cuda.get_device_capability()[0] != 9:
        return None

    def bind(x: Inputs) -> Call:
        codes = unpack_awq(x.qweight).view(x.k // 8, 8, x.n).to(torch.int32)
        packed = sum(codes[:, i] << 4 * i for i in range(8))
        assert isinstance(packed, torch.Tensor)
        scales = x.scales.to(x.x.dtype)
        weight = ops.machete_prepack_B(
            packed.t().contiguous().t(), a_type=x.x.dtype, b_type=scalar_types.uint4, group_scales_type=x.x.dtype
        )
        return functools.partial(
            ops.machete_mm, x.x, weight, scalar_types.uint4, b_group_scales=scales,
            b_group_zeros=-scales * unpack_awq(x.qzeros).to(scales.dtype), b_group_size=x.group_size,
        )  # fmt: skip

    return bind
