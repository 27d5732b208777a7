"""What a launch line may hold, and the environment of a server."""

from __future__ import annotations

import pytest

from labkit.serve import Launch


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"model": ""}, "model must be"),
        ({"model": None}, "model must be a folder or a name, and is None"),
        ({"model": "--help"}, "model must be"),
        ({"served_name": None}, "served_name must be a text"),
        ({"served_name": ""}, "served_name must be a text"),
        ({"dtype": "int4"}, "dtype must be one of"),
        ({"dtype": None}, "dtype must be one of"),
        ({"block_size": 0}, "block_size must be a whole number"),
        ({"kv_cache_memory": 1e9}, "kv_cache_memory must be a whole number"),
        ({"gpu_memory_utilization": 1.2}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": "0.9"}, "gpu_memory_utilization must be above 0"),
        ({"gpu_memory_utilization": True}, "gpu_memory_utilization must be above 0"),
        ({"kv_cache_dtype": 8}, "kv_cache_dtype must be a text"),
        ({"quantization": 4}, "quantization must be a text"),
        ({"attention_backend": ""}, "attention_backend must be a text"),
        ({"prefix_caching": "no"}, "prefix_caching must be True, False or None"),
        ({"eager": 1}, "eager must be True, False or None"),
        ({"eager": True, "capture_sizes": (1, 2)}, "eager: an eager engine captures no graphs"),
        ({"capture_sizes": 4}, "capture_sizes must be a tuple"),
        ({"capture_sizes": (1, "2")}, "capture_sizes must be a whole number"),
        ({"scheduler": "Mine"}, "scheduler must be 'module.Class'"),
        ({"scheduler": "mine."}, "scheduler must be 'module.Class'"),
        ({"scheduler": 3}, "scheduler must be a text"),
        ({"plugins": "labkit"}, "plugins must be a tuple, and is 'labkit'"),
        ({"plugins": (1,)}, "plugins must hold texts, and 1 is none"),
        ({"seed": "x"}, "seed must be a whole number of at least 0"),
        ({"more": "--enforce-eager"}, "more must be a tuple"),
        ({"more": None}, "more must be a tuple"),
        ({"more": ("-tp", 2)}, "more must hold texts, and 2 is none"),
        ({"more": ("--block-size=64",)}, "more: --block-size is what `block_size` is for"),
        ({"more": ("--max_model_len", "8")}, "more: --max-model-len is what `max_model_len` is for"),
        ({"more": ("--port", "8000")}, "more: --port is what `port` is for"),
        ({"environment": "A=1"}, "environment must map names to texts"),
        ({"model": "a\0b"}, "model must be"),
        ({"served_name": "a\0b"}, "served_name must be a text"),
        ({"more": ("a\0b",)}, "more must hold texts"),
        ({"environment": {"A": "\0"}}, "environment must map names to texts, and has 'A'"),
        ({"environment": {"A=B": "c"}}, "environment must map names to texts, and has 'A=B'"),
        ({"environment": {"A": 1}}, "environment must map names to texts, and has 'A': 1"),
    ],
)
def test_a_launch_line_is_typed(options, said):
    with pytest.raises(ValueError, match=said):
        Launch(**{"model": "m", **options})


def test_an_option_among_more_has_a_value():
    for more in (("-x", "-tp", "2"), ("-tp=2",), ("--tensor_parallel_size", "2", "-x"), ("--tensor-parallel-size=2",)):
        assert Launch("m", more=more).option("--tensor-parallel-size", "-tp") == "2", more
    assert Launch("m", more=("-tp",)).option("-tp") == "" and Launch("m", more=("a-tp",)).option("-tp") is None


def test_the_environment_is_offline_and_interprets_no_kernel(monkeypatch):
    for name, value in (("TRITON_INTERPRET", "1"), ("VLLM_LOGGING_LEVEL", "ERROR"), ("FORCE_COLOR", "1")):  # a notebook
        monkeypatch.setenv(name, value)
    found = Launch("m", plugins=("one", "two"), environment={"MINE": "1"}).variables()
    assert "VLLM_LOGGING_LEVEL" not in found, "a server that logs nothing seems to stand still"
    assert "TRITON_INTERPRET" not in found and found["HF_HUB_OFFLINE"] == "1" and found["MINE"] == "1"
    assert found["NO_COLOR"] == "1", "codes of colours would stand in the log that a student reads"
    assert found["VLLM_PLUGINS"] == "one,two" and "VLLM_PLUGINS" not in Launch("m").variables()
