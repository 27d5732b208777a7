"""What logs of vLLM say. Those in logs/ were written by vLLM 0.32 on a CPU, shortened to what a reader may look at."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit.serve import LogFacts, failure_reason, read_log
from labkit.serve.log import stage

LOGS = Path(__file__).parent / "logs"

# Lines as vLLM 0.32's format strings make them on a GPU (v1/worker, platforms/cuda.py, v1/core/kv_cache_utils.py).
ON_A_GPU = """
(EngineCore pid=7) INFO 11-30 07:53:51 [cuda.py:507] Using FLASH_ATTN attention backend out of potential backends: ['FLASH_ATTN', 'TRITON_ATTN'].
(EngineCore pid=7) INFO 11-30 07:53:59 [gpu_model_runner.py:5150] Model loading took 15.27 GiB memory and 2.101200 seconds
(EngineCore pid=7) INFO 11-30 07:54:20 [gpu_worker.py:759] Available KV cache memory: 108.45 GiB
(EngineCore pid=7) INFO 11-30 07:54:20 [kv_cache_utils.py:2327] GPU KV cache size: 789,696 tokens, Maximum concurrency for 40,960 tokens per request: 19.28x
(EngineCore pid=7) INFO 11-30 07:54:41 [gpu_model_runner.py:6582] Graph capturing finished in 12 secs, took 0.61 GiB
"""  # noqa: E501


def test_a_started_servers_log_states_the_facts():
    facts = read_log((LOGS / "started_cpu.log").read_text(encoding="utf-8"))
    assert (facts.version, facts.dtype, facts.device, facts.max_model_len) == ("0.32.0", "float32", "CPU", 512)
    assert (facts.block_size, facts.kv_tokens, facts.max_concurrency) == (32, 1280, 2.5)
    assert (facts.cudagraph_mode, facts.prefix_caching, facts.attention_backend) == ("NONE", True, None)


def test_a_gpus_log_names_backend_weights_and_graphs():
    facts = read_log(ON_A_GPU)
    assert (facts.device, facts.kv_tokens, facts.max_concurrency) == ("GPU", 789696, 19.28)
    assert (facts.attention_backend, facts.weights_gib, facts.graphs_gib) == ("FLASH_ATTN", 15.27, 0.61)
    assert facts.kv_memory_gib == 108.45


def test_what_a_log_does_not_say_is_none():
    assert read_log("nothing of interest\n") == LogFacts()


def test_stages_follow_each_other():
    text = (LOGS / "started_cpu.log").read_text(encoding="utf-8")
    lines, seen = text.splitlines(), []
    for end in range(1, len(lines) + 1):
        now = stage("\n".join(lines[:end]))
        if now not in seen:
            seen.append(now)
    assert seen == ["importing", "configuration", "engine", "weights", "KV cache", "opening the port"]


@pytest.mark.parametrize(
    ("name", "said"),
    {
        "kv": "too little KV memory: one request of max_model_len 1024 does not fit, 384 tokens would",
        "block": "block_size 16 is none that the attention backend CPU_ATTN has kernels for: it takes multiples of 32",
        "missing": "there is no model in the folder /nonexistent/model",
        "hub": "nothing is downloaded here",
        "long": "max_model_len 100000 is more than the 2048.0 positions",
        "port": "the port is taken",
        "nodemem": "set kv_cache_memory",
        "badarg": "does not know the arguments --nonsense",
        "quant": "quantization awq was asked for, and the checkpoint says nothing of it",
    }.items(),
)
def test_a_failed_start_says_why_in_one_sentence(name, said):
    reason = failure_reason((LOGS / f"fail_{name}.log").read_text(encoding="utf-8"))
    assert said in reason and "\n" not in reason, reason


def test_a_folder_at_the_root_that_is_missing_is_no_name_on_the_hub():
    text = "huggingface_hub.errors.HFValidationError: Repo id must use alphanumeric chars, '-': '/nonexistent'.\n"
    assert failure_reason(text).startswith("there is no model in the folder /nonexistent:")


def test_an_unknown_failure_gives_its_root_error():
    text = "(EngineCore pid=3) ERROR 11-30 [core.py:1] ValueError: the moon is full\n"
    assert failure_reason(text + "RuntimeError: Engine core initialization failed.\n").endswith(
        "ValueError: the moon is full"
    )
    assert failure_reason("Killed\n") == "Killed"
    dead = "(APIServer pid=2) ERROR 11-30 [serving.py:500] vllm.v1.engine.exceptions.EngineDeadError: see above\n"
    assert "ended from outside" in failure_reason(dead + "  warnings.warn('resource_tracker: There appear')\n")
    begun = "RuntimeError: Engine core initialization failed. See root cause above. Failed core proc(s): {}\n"
    assert "ended from outside" in failure_reason(begun), "it does not say what it calls the cause above"
    fell = "(EngineCore pid=3) ERROR 11-30 [core.py:1] ValueError: it fell\n"
    assert failure_reason(fell + dead).endswith("ValueError: it fell"), "what the engine said comes first"
    assert "ended from outside" in failure_reason("RecursionError: of a request\n" + dead), "a request ends no engine"
    killed = (
        "(APIServer pid=2) INFO 11-30 [launcher.py:46] Route: /v1\n/lib/resource_tracker.py:254: UserWarning: leaked\n"
    )
    assert failure_reason(killed + "  warnings.warn('leaked')\n").startswith("it was ended from outside")
    assert failure_reason("") == "its log is empty"


CHECKED = """pydantic_core._pydantic_core.ValidationError: 1 validation error for ModelConfig
  Value error, {} [type=value_error, input_type=ArgsKwargs]
    For further information visit https://errors.pydantic.dev/2.14/v/value_error
"""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (CHECKED.format("the moon is full"), "the moon is full"),
        (
            CHECKED.format("Invalid repository ID or local directory specified: '/models/mine'."),
            "there is no model in the folder /models/mine:",
        ),
        ("RuntimeError: Cannot find any model weights with `/models/mine`\n", "there are no weights in the folder /mo"),
        (
            "safetensors._safetensors_rust.SafetensorError: file not fully covered\n"
            "RuntimeError: Engine core initialization failed. See root cause above.\n",
            "a file of weights is broken (file not fully covered)",
        ),
        (
            "some.library.MoonError: it is full\nRuntimeError: Engine core initialization failed.\n",
            "some.library.MoonE",
        ),
    ],
)
def test_a_broken_model_folder_is_said_by_what_it_lacks(text, said):
    assert failure_reason(text).startswith(said), failure_reason(text)
