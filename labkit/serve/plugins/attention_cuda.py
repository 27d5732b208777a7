"""Our attention as vLLM's CUSTOM backend on CUDA, around its Triton backend. Imported by vLLM, by name."""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from vllm._custom_ops import reshape_and_cache_flash
from vllm.v1.attention.backend import AttentionCGSupport
from vllm.v1.attention.backends.triton_attn import (
    TritonAttentionBackend,
    TritonAttentionImpl,
    TritonAttentionMetadataBuilder,
)

from labkit.serve.plugins import attention


class LabImpl(attention.Served, TritonAttentionImpl):
    """Around vLLM's Triton attention."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write K and V with vLLM's compiled operation: launching its Triton backend's kernel takes the host longer."""
        if self.attention is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        k_cache, v_cache = attention.views(self, kv_cache)
        reshape_and_cache_flash(
            key, value, k_cache, v_cache, slot_mapping, self.kv_cache_dtype, layer._k_scale, layer._v_scale
        )
        return None

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """No: our kernels write the output as it is."""
        return False


class LabBuilder(TritonAttentionMetadataBuilder):
    """The stock builder; when it is made, before any graph is captured, our function is put to the proof.

    Graphs hold decode steps only: which of our two kernels runs is decided on the host, so a graph of mixed batches
    would replay the wrong one.
    """

    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        attention.install(self, layer_names)


class LabBackend(TritonAttentionBackend):
    """vLLM asks for it by the name CUSTOM (`--attention-backend CUSTOM`)."""

    @staticmethod
    def get_name() -> str:
        """The name of the slot that it is registered in."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[LabImpl]:
        """What attends."""
        return LabImpl

    @staticmethod
    def get_builder_cls() -> type[LabBuilder]:
        """What prepares a step's metadata."""
        return LabBuilder
