"""Our attention in the slot of vLLM's CPU attention. Imported by vLLM, by name."""

from __future__ import annotations

from typing import Any

import torch
from vllm.v1.attention.backends.cpu_attn import (
    CPUAttentionBackend,
    CPUAttentionBackendImpl,
    CPUAttentionMetadataBuilder,
)

from labkit.serve.plugins import attention


class LabImpl(attention.Served, CPUAttentionBackendImpl):
    """Around vLLM's attention of CPUs."""

    def do_kv_cache_update(
        self, layer: Any, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Write K and V side by side; the stock kernel keeps all of a block's K before its V."""
        if self.attention is None:
            return super().do_kv_cache_update(layer, key, value, kv_cache, slot_mapping)
        k_cache, v_cache = attention.views(self, kv_cache)
        block_size, tokens = k_cache.shape[1], slot_mapping.shape[0]
        real = slot_mapping >= 0
        slots = slot_mapping[real].long()
        k_cache[slots // block_size, slots % block_size] = key[:tokens][real]
        v_cache[slots // block_size, slots % block_size] = value[:tokens][real]
        return None


class LabBuilder(CPUAttentionMetadataBuilder):
    """The stock builder; when it is made, our function is put to the proof."""

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        self.device = device
        attention.install(self, layer_names)


class LabBackend(CPUAttentionBackend):
    """Named CPU_ATTN still, since that is the slot it sits in."""

    @staticmethod
    def get_impl_cls() -> type[LabImpl]:
        """What attends."""
        return LabImpl

    @staticmethod
    def get_builder_cls() -> type[LabBuilder]:
        """What prepares a step's metadata."""
        return LabBuilder
