"""One layer's step as vLLM hands it to the plugin: padding, caches in either memory order, layers that do not fit."""

from __future__ import annotations

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
import torch

from kernels import reference
from labkit.checks.lab5_vllm_serving.attention import batch
from labkit.serve.plugins import attention


def step(lengths: list[int], chunks: list[int], padded: int = 0) -> tuple:
    """impl, query, kv_cache, metadata, out, and the reference. padded: sequences and tokens added for a graph."""
    q, k_cache, v_cache, table, seq_lens, starts = batch(lengths, chunks)
    want = reference.paged_prefill(q, k_cache, v_cache, table, seq_lens, starts, scale=0.3, dtype=torch.float32)[0]
    kv_cache = torch.cat((k_cache, v_cache), -1).transpose(1, 2)
    zeros = torch.zeros(padded, dtype=torch.int32)
    metadata = SimpleNamespace(
        num_actual_tokens=len(q) + padded,
        max_query_len=max(chunks),
        max_seq_len=max(lengths),
        query_start_loc=torch.cat((starts, starts[-1] + torch.arange(1, padded + 1, dtype=torch.int32))),
        seq_lens=torch.cat((seq_lens, zeros)),
        block_table=torch.cat((table, torch.full((padded, table.shape[1]), 999, dtype=torch.int32))),
    )
    query = torch.cat((q, q.new_zeros(padded + 3, *q.shape[1:])))
    return SimpleNamespace(scale=0.3, kv_cache=None), query, kv_cache, metadata, torch.full_like(query, 7.0), want


@pytest.mark.parametrize("contiguous", [False, True], ids=["tokens first", "heads first"])
def test_decode_steps_padded_for_a_graph_give_what_unpadded_ones_give(contiguous):
    impl, query, kv_cache, metadata, out, want = step([20, 5, 33], [1, 1, 1], padded=2)
    kv_cache = kv_cache.contiguous() if contiguous else kv_cache
    attention.run(attention.kernels_attention, impl, query, kv_cache, metadata, out)
    assert torch.allclose(out[:3].float(), want.float(), atol=2e-3)
    assert (out[3:5] == 0).all(), "padding attends to nothing"
    assert (out[5:] == 7).all(), "rows beyond the batch are not ours to write"


def test_prompts_among_decode_steps_go_through_the_other_kernel():
    impl, query, kv_cache, metadata, out, want = step([20, 17, 33], [1, 17, 9])
    attention.run(attention.kernels_attention, impl, query, kv_cache, metadata, out)
    assert torch.allclose(out[:27].float(), want.float(), atol=2e-3)


@pytest.mark.parametrize(("longest", "checked"), [(33, False), (2**23, True)])
def test_a_step_that_the_host_waits_for_is_launched_unchecked_and_no_other(monkeypatch, longest, checked):
    called = []
    monkeypatch.setattr(attention, "paged_prefill", lambda *a, **kw: called.append(True))
    impl, query, kv_cache, metadata, out, want = step([20, 17, 33], [1, 17, 9])
    metadata.max_seq_len = longest
    attention.run(attention.kernels_attention, impl, query, kv_cache, metadata, out)
    assert bool(called) == checked, "a long context is worth the kernel that takes longer to launch"
    assert checked or torch.allclose(out[:27].float(), want.float(), atol=2e-3)
    assert not attention.is_light(1024, 1), "as many tokens keep the GPU busy whatever the context"


def test_a_block_table_with_rows_to_spare_is_cut():
    impl, query, kv_cache, metadata, out, want = step([20, 5], [1, 1])
    metadata.block_table = torch.cat((metadata.block_table, metadata.block_table))
    attention.run(attention.kernels_attention, impl, query, kv_cache, metadata, out)
    assert torch.allclose(out[:2].float(), want.float(), atol=2e-3)


def test_what_another_function_returns_is_copied_out():
    impl, query, kv_cache, metadata, out, _ = step([20, 5], [1, 1])
    attention.run(lambda q, *others: q + 1, impl, query, kv_cache, metadata, out)
    assert torch.equal(out[:2], query[:2] + 1) and (out[2:] == 7).all()


@pytest.mark.parametrize(
    ("feature", "named"),
    [
        ({"sliding_window": (127, 0)}, "a sliding window"),
        ({"logits_soft_cap": 30.0}, "a soft cap"),
        ({"alibi_slopes": [1.0]}, "alibi"),
        ({"sinks": torch.zeros(2)}, "attention sinks"),
        ({"kv_cache_dtype": "fp8"}, "a quantised KV cache"),
        ({"attn_type": "encoder"}, "attention of type encoder"),
    ],
)
def test_layers_with_more_than_plain_causal_attention_are_left_to_vllm(feature, named):
    plain = {"attn_type": "decoder", "sliding_window": (-1, -1), "logits_soft_cap": 0, "kv_cache_dtype": "auto"}
    assert attention.unsupported(SimpleNamespace(**plain)) == ""
    assert attention.unsupported(SimpleNamespace(**(plain | feature))) == f"this layer has {named}"


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: there is no backend to build on")
def test_the_backend_for_gpus_captures_decode_steps_only_and_sits_in_the_slot_custom():
    from vllm.v1.attention.backend import AttentionCGSupport

    from labkit.serve.plugins.attention_cuda import LabBackend

    assert LabBackend.get_name() == "CUSTOM" and LabBackend.get_impl_cls().__mro__[2].__name__ == "TritonAttentionImpl"
    support = LabBackend.get_builder_cls()._cudagraph_support
    assert support == AttentionCGSupport.UNIFORM_SINGLE_TOKEN_DECODE
