"""Shapes of real models: what decides the size of weights, of a KV cache, and of a hybrid model's block.

Numbers are those of each model's published config.json. Sizes in bytes, lengths in tokens.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class RecurrentState:
    """What a Gated DeltaNet layer keeps for each sequence, whatever its length (arXiv 2412.06464).

    A convolution window of the last conv_kernel - 1 inputs, kept in the model's dtype, and one matrix of
    value_head_dim x key_head_dim for each value head.
    """

    num_key_heads: int
    num_value_heads: int
    key_head_dim: int
    value_head_dim: int
    conv_kernel: int

    def page_bytes(self, state_bytes: int, conv_bytes: int = 2) -> int:
        """Bytes of one layer's state for one sequence; state_bytes: of a matrix element, 2 for bf16 or 4 for fp32."""
        channels = 2 * self.key_head_dim * self.num_key_heads + self.value_head_dim * self.num_value_heads
        matrices = self.num_value_heads * self.value_head_dim * self.key_head_dim
        return channels * (self.conv_kernel - 1) * conv_bytes + matrices * state_bytes


@dataclass(frozen=True)
class ModelShape:
    """The numbers of a decoder that the sizes of its KV cache and weights depend on.

    attention_layers: layers with a KV cache; in a hybrid model fewer than num_layers, since the others keep a state
    (`state`) whose size does not depend on the sequence length. hidden_size, intermediate_size, vocab_size: 0 where
    only the KV cache matters. qk_norm: each head's q and k are normalised with a weight of head_dim. parameters: those
    that the makers count, where they are not the ones that `weight_count` derives.
    """

    name: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    attention_layers: int
    hidden_size: int = 0
    intermediate_size: int = 0
    vocab_size: int = 0
    tied_embeddings: bool = False
    qk_norm: bool = False
    max_position: int = 0
    state: RecurrentState | None = None
    parameters: int | None = None

    @property
    def weight_count(self) -> int:
        """Parameters: `parameters` where given, else those of a dense Llama or Qwen3 decoder with a SwiGLU MLP.

        ValueError if the shape lacks a size that this takes.
        """
        if self.parameters is not None:
            return self.parameters
        if not (self.hidden_size and self.intermediate_size and self.vocab_size):
            raise ValueError(f"{self.name}: weights need hidden_size, intermediate_size and vocab_size")
        if self.state is not None:
            raise ValueError(f"{self.name}: a hybrid model's parameters cannot be derived from its shape")
        hidden = self.hidden_size
        attention = hidden * self.head_dim * (2 * self.num_heads + 2 * self.num_kv_heads)
        norms = 2 * hidden + (2 * self.head_dim if self.qk_norm else 0)
        layer = attention + 3 * hidden * self.intermediate_size + norms
        embeddings = self.vocab_size * hidden * (1 if self.tied_embeddings else 2)
        return self.num_layers * layer + embeddings + hidden

    def kv_layer_bytes(self, dtype_bytes: int = 2) -> int:
        """Bytes of K and V that one token takes in one layer."""
        return 2 * self.num_kv_heads * self.head_dim * dtype_bytes

    def hybrid_block_size(self, state_bytes: int = 2, multiple: int = 16, dtype_bytes: int = 2) -> int:
        """Tokens of an attention block when its page must hold a recurrent state, as vLLM lays hybrid models out.

        The smallest multiple of `multiple`, the kernel's own block size (16, or 64 for some backends), whose K and V in
        one layer take at least the bytes of one state (vLLM: platforms/interface.py, "Setting attention block size").
        ValueError for a model without a state.
        """
        if self.state is None:
            raise ValueError(f"{self.name} has no recurrent state: its block size is free")
        tokens = -(-self.state.page_bytes(state_bytes) // self.kv_layer_bytes(dtype_bytes))
        return -(-tokens // multiple) * multiple


LLAMA_2_7B = ModelShape(
    "Llama-2-7B", 32, 32, 32, 128, 32, hidden_size=4096, intermediate_size=11008, vocab_size=32000, max_position=4096
)
"""Multi-head attention: every query head has a KV head of its own (arXiv 2307.09288)."""

LLAMA_3_1_8B = ModelShape(
    "Llama-3.1-8B", 32, 32, 8, 128, 32,
    hidden_size=4096, intermediate_size=14336, vocab_size=128256, max_position=131072,
)  # fmt: skip
"""Grouped queries, four to a KV head (arXiv 2407.21783)."""

QWEN3_0_6B = ModelShape(
    "Qwen3-0.6B", 28, 16, 8, 128, 28,
    hidden_size=1024, intermediate_size=3072, vocab_size=151936, tied_embeddings=True, qk_norm=True, max_position=40960,
)  # fmt: skip
"""head_dim is not hidden_size / num_heads here (arXiv 2505.09388)."""

QWEN3_8B = ModelShape(
    "Qwen3-8B", 36, 32, 8, 128, 36,
    hidden_size=4096, intermediate_size=12288, vocab_size=151936, qk_norm=True, max_position=40960,
)  # fmt: skip
"""Grouped queries, four to a KV head (arXiv 2505.09388)."""

QWEN3_32B = ModelShape(
    "Qwen3-32B", 64, 64, 8, 128, 64,
    hidden_size=5120, intermediate_size=25600, vocab_size=151936, qk_norm=True, max_position=40960,
)  # fmt: skip
"""Grouped queries, eight to a KV head (arXiv 2505.09388)."""

QWEN3_8_27B = ModelShape(
    "Qwen3.8-27B", 64, 24, 4, 256, 16,
    max_position=262144,
    state=RecurrentState(num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128, conv_kernel=4),
    parameters=27_780_000_000,
)  # fmt: skip
"""A hybrid: every fourth layer attends, the other 48 are Gated DeltaNet layers. The shapes are those of the published
card of Qwen3.6-27B, whose architecture it keeps; parameters to four digits, the vision part included."""

SHAPES = {s.name: s for s in (LLAMA_2_7B, LLAMA_3_1_8B, QWEN3_0_6B, QWEN3_8B, QWEN3_32B, QWEN3_8_27B)}
