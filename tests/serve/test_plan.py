"""The plan against vLLM's own arithmetic of blocks, and launch lines that are refused."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from labkit.models import LLAMA_3_1_8B, QWEN3_8_27B, QWEN3_8B, QWEN3_32B, tiny_path
from labkit.serve import Inconsistent, Launch, plan_capacity, shape_of
from labkit.serve.plan import default_capture_sizes, weight_bytes

GIB = 1 << 30

# vLLM's blocks, bytes of a block and concurrency of a model of `attention` and `recurrent` layers, without a model.
ASK_VLLM = """
import json, sys
from types import SimpleNamespace as N
import torch
from vllm.v1.core import kv_cache_utils as u
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, MambaSpec

out = []
for case in json.load(sys.stdin):
    full = FullAttentionSpec(block_size=case["block"], num_kv_heads=case["heads"], head_size=case["dim"],
                             dtype=torch.bfloat16)
    specs = {f"a{i}": full for i in range(case["attention"])}
    state = MambaSpec(shapes=((8, 8),), dtypes=(torch.bfloat16,), block_size=case["block"],
                      page_size_padded=full.page_size_bytes, mamba_cache_mode=case["mode"])
    specs |= {f"m{i}": state for i in range(case["recurrent"])}
    if case["recurrent"]:
        groups = u._get_kv_cache_groups_uniform_page_size(specs)
    else:
        groups = u._get_kv_cache_groups_uniform_spec(specs)
    config = N(model_config=N(max_model_len=case["length"]), cache_config=N(mamba_cache_mode=case["mode"]),
               parallel_config=N(decode_context_parallel_size=1, prefill_context_parallel_size=1))
    of_block = max(sum(specs[name].page_size_bytes for name in g.layer_names) for g in groups)
    blocks = case["bytes"] // of_block
    kv = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    tokens, concurrency = u.get_kv_cache_capacity(config, kv)
    out.append([blocks, tokens, concurrency])
print(json.dumps(out))
"""
CASES = [
    (QWEN3_8B, 4 * GIB, 4096, None),
    (LLAMA_3_1_8B, 3 * GIB + 12345, 5000, None),
    (QWEN3_32B, 12 * GIB, 40960, None),
    (QWEN3_8_27B, 8 * GIB, 16384, True),
    (QWEN3_8_27B, 8 * GIB, 32768, False),
]


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its arithmetic cannot be asked")
def test_blocks_tokens_and_concurrency_are_those_of_vllm():
    plans, asked = [], []
    for shape, size, length, caching in CASES:
        launch = Launch("m", max_model_len=length, kv_cache_memory=size, prefix_caching=caching)
        plan = plan_capacity(shape, launch, device="cuda")
        plans.append([plan.blocks, plan.kv_tokens, plan.max_concurrency])
        asked.append(
            {
                "block": plan.block_size, "heads": shape.num_kv_heads, "dim": shape.head_dim, "bytes": size,
                "attention": shape.attention_layers, "recurrent": shape.num_layers - shape.attention_layers,
                "length": length, "mode": "align" if caching else "none",
            }
        )  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-c", ASK_VLLM], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    for case, ours, theirs in zip(CASES, plans, json.loads(done.stdout.splitlines()[-1]), strict=True):
        assert ours == pytest.approx(theirs), f"{case[0].name}: [blocks, tokens, concurrency]"


def test_the_shape_is_read_from_a_config():
    shape = shape_of(tiny_path())
    assert (shape.num_layers, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4, 4, 2, 64)
    weights = Path(tiny_path()) / "model.safetensors"
    assert weight_bytes(shape, "bfloat16") == pytest.approx(weights.stat().st_size, rel=0.01)


def test_a_hybrid_config_has_a_state_and_fewer_layers_with_a_cache():
    config = {
        "num_hidden_layers": 8, "num_attention_heads": 4, "hidden_size": 256, "num_key_value_heads": 2, "head_dim": 64,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2, "max_position_embeddings": 4096,
        "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 64, "linear_value_head_dim": 64,
        "linear_conv_kernel_dim": 4,
    }  # fmt: skip
    shape = shape_of({"text_config": config})
    assert shape.attention_layers == 2 and shape.state is not None and shape.state.num_value_heads == 4
    with pytest.raises(ValueError, match="lacks num_hidden_layers"):
        shape_of({"hidden_size": 4})


def test_what_is_left_of_a_gpu_is_the_cache():
    launch = Launch("m", max_model_len=16384, gpu_memory_utilization=0.9)
    plan = plan_capacity(QWEN3_8B, launch, memory=80 * GIB, device="cuda")
    assert sum(plan.parts().values()) == pytest.approx(72 * GIB, rel=1e-6)
    assert plan.weights == 2 * QWEN3_8B.weight_count and plan.kv_bytes_per_token == 36 * 2 * 8 * 128 * 2
    eager = plan_capacity(QWEN3_8B, Launch("m", max_model_len=16384, eager=True), memory=80 * GIB, device="cuda")
    assert eager.graphs == 0 < plan.graphs
    smaller = plan_capacity(QWEN3_8B, launch, memory=80 * GIB, device="cuda", weights="int4")
    assert smaller.weights < 0.4 * plan.weights and smaller.kv_tokens > plan.kv_tokens
    doubled = Launch("m", max_model_len=16384, kv_cache_memory=4 * GIB, kv_cache_dtype="fp8")
    half = Launch("m", max_model_len=16384, kv_cache_memory=4 * GIB)
    blocks = [plan_capacity(QWEN3_8B, line, device="cuda").blocks for line in (doubled, half)]
    assert abs(blocks[0] - 2 * blocks[1]) <= 1


def test_default_capture_sizes_are_those_of_vllm():
    sizes = default_capture_sizes(256)
    assert sizes[:5] == [1, 2, 4, 8, 16] and sizes[-2:] == [496, 512] and len(sizes) == 51
    assert default_capture_sizes(4) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("line", "options", "said"),
    [
        ({"max_model_len": 40961}, {}, "more than the 40,960 positions"),
        ({"max_num_batched_tokens": 64, "max_num_seqs": 65}, {}, "less than max_num_seqs"),
        (
            {"max_model_len": 16384, "max_num_batched_tokens": 8192, "more": ("--no-enable-chunked-prefill",)}, {},
            "without chunked prefill a prompt of max_model_len 16,384",
        ),
        ({"block_size": 20}, {}, "block_size 20 is no multiple of 16"),
        ({"block_size": 16, "kv_cache_memory": GIB}, {"device": "cpu"}, "block_size 16 is no multiple of 32"),
        ({}, {"device": "cpu"}, "unless kv_cache_memory says how much"),
        ({}, {"memory": 16 * GIB}, "nothing is left for the KV cache: 92% of 16.0 GiB"),
        ({"more": ("-tp", "3")}, {}, "tensor parallel size 3 does not divide the model's 32 attention heads"),
        ({"more": ("--tensor_parallel_size=64",)}, {}, "tensor parallel size 64 does not divide"),
        ({"max_model_len": 16384, "kv_cache_memory": GIB}, {}, "needs 2.25 GiB, and 1.00 are there: 7,280 tokens"),
    ],
)  # fmt: skip
def test_a_line_that_cannot_work_is_refused_with_the_reason(line, options, said):
    with pytest.raises(Inconsistent, match=said):
        plan_capacity(QWEN3_8B, Launch("m", **line), **{"device": "cuda", "memory": 80 * GIB, **options})


def test_devices_share_heads_and_weights():
    one, two = (
        plan_capacity(QWEN3_8B, Launch("m", max_model_len=16384, more=more), memory=80 * GIB, device="cuda")
        for more in ((), ("-tp", "2"))
    )
    assert two.kv_bytes_per_token == one.kv_bytes_per_token / 2 and two.weights == pytest.approx(
        one.weights / 2, rel=1e-3
    )
    assert two.kv_tokens > 2 * one.kv_tokens
    hybrid = plan_capacity(
        QWEN3_8_27B, Launch("m", max_model_len=16384, kv_cache_memory=8 * GIB, more=("-tp", "2")), device="cuda"
    )
    assert hybrid.kv_bytes_per_token == 16 * 2 * 2 * 256 * 2
    with pytest.raises(Inconsistent, match="3 and the model's 4 KV heads: neither divides the other"):
        plan_capacity(QWEN3_8_27B, Launch("m", kv_cache_memory=8 * GIB, more=("-tp", "3")), device="cuda")
    for more, said in ((("-tp", "x"), "--tensor-parallel-size must be a whole"), (("-pp", "2"), "is not planned for")):
        with pytest.raises(ValueError, match=said):
            plan_capacity(QWEN3_8B, Launch("m", more=more), memory=80 * GIB, device="cuda")


def test_the_tokens_that_would_fit_do_and_one_block_more_does_not():
    for shape in (QWEN3_8B, QWEN3_8_27B):
        options: dict[str, Any] = {"kv_cache_memory": 4 * GIB, "block_size": 16}
        with pytest.raises(Inconsistent) as refused:
            plan_capacity(shape, Launch("m", max_model_len=shape.max_position, **options), device="cuda")
        fit = int(str(refused.value).rpartition(": ")[2].split()[0].replace(",", ""))
        plan = plan_capacity(shape, Launch("m", max_model_len=fit, **options), device="cuda")
        with pytest.raises(Inconsistent):
            plan_capacity(shape, Launch("m", max_model_len=fit + plan.block_size, **options), device="cuda")


SMALL = {"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 8}


@pytest.mark.parametrize(
    ("model", "said"),
    [
        ("/nonexistent", "model: /nonexistent/config.json cannot be read: No such file"),
        (3, "model must be a shape"),
        (None, "model must be a shape"),
        ({}, "lacks num_hidden_layers, num_attention_heads, hidden_size"),
        ({**SMALL, "num_hidden_layers": "2"}, "model: num_hidden_layers must be a whole number"),
        ({**SMALL, "num_attention_heads": 0}, "model: num_attention_heads must be a whole number"),
        ({**SMALL, "num_key_value_heads": -1}, "model: num_key_value_heads must be a whole number"),
        ({**SMALL, "layer_types": ["full_attention"]}, "layer_types must be 2 times .* and are 1: full_attention"),
        ({**SMALL, "layer_types": ["sliding_attention"] * 2}, "and are 2: sliding_attention"),
        ({**SMALL, "layer_types": ["linear_attention"] * 2}, "none of its layers attends"),
        ({**SMALL, "layer_types": ["linear_attention", "full_attention"]}, "lacks linear_num_key_heads"),
    ],
)
def test_a_config_that_is_none_is_refused_by_name(model, said):
    with pytest.raises(ValueError, match=said):
        plan_capacity(model, Launch("m", kv_cache_memory=GIB, max_model_len=128), device="cuda")


def test_a_config_of_null_fields_is_one_without_them(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**SMALL, "num_key_value_heads": None, "text_config": None}))
    assert shape_of(tmp_path).num_kv_heads == 4
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is no JSON"):
        shape_of(tmp_path)


def test_a_missing_size_is_asked_for():
    with pytest.raises(ValueError, match="memory: "):
        plan_capacity(QWEN3_8B, Launch("m"), device="cuda")
    for memory in (0, -1, "80", True, float("nan")):
        with pytest.raises(ValueError, match="memory must be a number of bytes"):
            plan_capacity(QWEN3_8B, Launch("m"), device="cuda", memory=memory)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="launch must be"):
        plan_capacity(QWEN3_8B, "m", device="cuda")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weights must be one of"):
        plan_capacity(QWEN3_8B, Launch("m"), device="cuda", memory=GIB, weights="int3")
