"""Bad input, streaming, ends of all kinds: every block comes back."""

from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from labkit.engine import Engine, EngineConfig, EngineError, ModelConfig, Priority, SamplingParams, Status
from labkit.engine.config import DTYPES
from labkit.models import QWEN3_0_6B, QWEN3_8_27B


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "prompt must hold at least one token, and is empty"),
        ([1] * 64, {}, "prompt has 64 tokens: the model's length is 64"),
        ([1, 97], {}, r"prompt\[1\] must be a token id in 0..96, and is 97"),
        ([1] * 30, {"max_tokens": 11}, r"need 10 KV blocks of 4 tokens; the pool has 9: raise num_blocks or lower"),
    ],
)
def test_a_prompt_that_can_never_be_served_is_refused_and_nothing_else_is_touched(mini, prompt, params, message):
    engine = mini(num_blocks=9)
    with pytest.raises(ValueError, match=message):
        engine.add(prompt, SamplingParams(**params))
    with pytest.raises(ValueError, match=message):
        engine.generate([[1, 2], prompt], SamplingParams(**params))
    assert not engine.busy and engine.generate([[1, 2]]), "the engine still serves others"


def test_the_largest_request_that_fits_the_pool_is_served(mini):
    engine = mini(num_blocks=9)
    assert len(engine.generate([[1] * 27], SamplingParams(max_tokens=10, ignore_eos=True))[0]) == 10


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_num_seqs": 9, "max_num_batched_tokens": 8}, "max_num_batched_tokens .8. must be at least max_num_seqs"),
        ({"num_blocks": 0}, "num_blocks must be at least 1, and is 0"),
        ({"graphs": "on"}, "graphs must be one of"),
        ({"kernels": "flash"}, "kernels must be one of"),
        ({"watermark": 1.0}, "watermark"),
        ({"device": "meta"}, "device must be cpu or cuda, and is 'meta'"),
    ],
)
def test_options_that_do_not_go_together_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(**options)


def test_an_engine_longer_than_its_model_or_without_capture_sizes_is_refused(mini):
    with pytest.raises(ValueError, match=r"max_model_len \(300\) is beyond the model's 256 positions"):
        mini(max_model_len=300)
    with pytest.raises(ValueError, match="capture_sizes must hold batch sizes of at least 1"):
        mini(graphs="capture", capture_sizes=())


@pytest.mark.parametrize(
    "values", [{"max_tokens": 0}, {"temperature": -1}, {"temperature": float("nan")}, {"top_p": 0}, {"seed": -1}]
)
def test_sampling_parameters_out_of_range_name_themselves(values):
    with pytest.raises(ValueError, match=f"^{next(iter(values))} must be"):
        SamplingParams(**values)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"model_type": "mamba"}, "model_type must be one of llama, qwen3, and is 'mamba'"),
        ({"attention_bias": True}, "attention_bias must be False"),
        ({"hidden_act": "gelu"}, "hidden_act must be silu"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type must be default or llama3, and is 'yarn'"),
        ({"dtype": "float8_e4m3fn"}, f"dtype must be one of {', '.join(DTYPES)}"),
        ({"intermediate_size": 640}, r"gate_proj.weight must be \[640, 256\] by config.json, and is \[512, 256\]"),
        ({"num_hidden_layers": 5}, r"holds no tensor model\.layers\.4\."),
    ],
)
def test_a_checkpoint_that_is_not_what_it_says_is_refused(tiny, tmp_path, changed, message):
    source = tiny("qwen3")
    raw = json.loads((source / "config.json").read_text(encoding="utf-8"))
    (tmp_path / "config.json").write_text(json.dumps({**raw, **changed}), encoding="utf-8")
    (tmp_path / "model.safetensors").symlink_to(source / "model.safetensors")
    with pytest.raises(ValueError, match=message):
        Engine.load(tmp_path)


def test_a_folder_without_a_checkpoint_is_refused(tiny, tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no config\.json"):
        Engine.load(tmp_path)
    (tmp_path / "config.json").write_bytes((tiny("llama") / "config.json").read_bytes())
    with pytest.raises(FileNotFoundError, match=r"lacks model\.safetensors"):
        Engine.load(tmp_path)


def test_a_shape_becomes_a_model_and_a_hybrid_one_does_not():
    config = ModelConfig.from_shape(QWEN3_0_6B)
    assert config.qk_norm and config.tied_embeddings and config.head_dim == 128
    with pytest.raises(ValueError, match="only dense decoders"):
        ModelConfig.from_shape(QWEN3_8_27B)


def test_a_stream_gives_the_tokens_of_generate_one_at_a_time(mini, assert_whole):
    engine = mini()
    params = SamplingParams(max_tokens=6, ignore_eos=True)
    first, second = engine.stream([1, 2, 3], params), engine.stream([4, 5], params)
    pairs = list(zip(first, second, strict=True))
    assert [list(x) for x in zip(*pairs, strict=True)] == mini().generate([[1, 2, 3], [4, 5]], params)
    assert_whole(engine)


def test_closing_a_stream_cancels_its_request_alone(mini, assert_whole):
    engine = mini()
    other = engine.add([7], SamplingParams(max_tokens=3, ignore_eos=True))
    stream = engine.stream([1, 2, 3], SamplingParams(max_tokens=50, ignore_eos=True))
    next(stream)
    stream.close()
    assert engine.counters.cancelled == 1 and other.status is Status.RUNNING
    while engine.busy:
        engine.step()
    assert other.status is Status.FINISHED
    assert_whole(engine)


def test_a_request_ends_with_the_models_end_token_or_its_own_or_at_the_models_length(mini):
    free = mini().generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))[0]
    stop = free[4]
    request = (engine := mini()).add([1, 2, 3], SamplingParams(max_tokens=8, stop_token_ids=(stop,), ignore_eos=True))
    while engine.busy:
        engine.step()
    assert request.output == free[: free.index(stop) + 1] and request.reason == "stop"
    assert len(mini().generate([[1] * 60], SamplingParams(max_tokens=99, ignore_eos=True))[0]) == 4


def test_a_failed_step_costs_only_the_requests_in_it(mini, monkeypatch, assert_whole):
    engine = mini(max_num_seqs=1)
    hit, spared = engine.add([1, 2]), engine.add([3])
    with monkeypatch.context() as patched:
        patched.setattr(engine.runner.model, "forward", lambda *_: 1 / 0)
        with pytest.raises(EngineError, match=r"the step of requests \[0\] failed: ZeroDivisionError"):
            engine.step()
    assert hit.status is Status.FAILED and isinstance(hit.error, ZeroDivisionError) and not hit.block_table
    while engine.busy:
        engine.step()
    assert spared.status is Status.FINISHED and engine.counters.failed == 1
    assert_whole(engine)


def test_an_interrupt_stays_one_and_returns_the_blocks(mini, monkeypatch, assert_whole):
    def interrupt(*_):
        raise KeyboardInterrupt

    engine = mini()
    monkeypatch.setattr(engine.runner, "launch", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([[1, 2], [3]])
    assert_whole(engine)


EVENTS = st.lists(
    st.one_of(
        st.tuples(
            st.just("add"), st.integers(0, 2), st.integers(1, 24), st.integers(1, 12), st.integers(0, 3)
        ),  # family of the prompt, its length, tokens to generate, priority
        st.tuples(st.just("cancel"), st.integers(0, 9)),
        st.tuples(st.just("fail")),
        st.tuples(st.just("step"), st.integers(1, 6)),
    ),
    min_size=1,
    max_size=14,
)  # fmt: skip


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    EVENTS, st.integers(9, 16), st.integers(3, 16), st.booleans(), st.sampled_from(["off", "capture"]), st.booleans()
)
def test_the_pool_is_whole_and_the_tokens_are_right_after_any_trace(
    mini, alone, assert_whole, events, blocks, budget, caching, graphs, overlap
):
    engine = mini(
        policy=Priority(ageing=7), num_blocks=blocks, max_num_batched_tokens=budget, max_num_seqs=3,
        prefix_caching=caching, graphs=graphs, overlap=overlap,
    )  # fmt: skip
    requests, launch = [], engine.runner.launch
    for kind, *args in events:
        if kind == "add":
            kind_of_prompt, length, tokens, priority = args
            prompt = [1 + (kind_of_prompt * 31 + i * i) % 90 for i in range(length)]
            requests.append(engine.add(prompt, SamplingParams(max_tokens=tokens, ignore_eos=True), priority=priority))
        elif kind == "cancel" and requests:
            engine.cancel(requests[args[0] % len(requests)])
        elif kind == "fail" and engine.busy:
            engine.runner.launch = lambda chunks: 1 / 0
            tokens_are_on_their_way = all(r.pending == 0 for r in engine.scheduler.running + engine.scheduler.waiting)
            with contextlib.nullcontext() if tokens_are_on_their_way else pytest.raises(EngineError):
                engine.step()
            engine.runner.launch = launch
        elif kind == "step":
            for _ in range(args[0]):
                engine.step()
    steps = 0
    while engine.busy:
        engine.step()
        assert (steps := steps + 1) < 2000, "no progress"
    assert_whole(engine)
    for request in requests:
        assert request.status.final
        if request.status is Status.FINISHED:
            assert request.output == alone(request.tokens[: request.prompt_len], request.params.max_tokens)


@pytest.fixture(scope="module")
def alone(mini):
    """What a prompt gives when nothing else runs."""
    known: dict[tuple[int, ...], list[int]] = {}

    def generate(prompt: list[int], tokens: int) -> list[int]:
        key = tuple(prompt)
        if key not in known:
            known[key] = mini(prefix_caching=False).generate([prompt], SamplingParams(max_tokens=12, ignore_eos=True))[
                0
            ]
        return known[key][:tokens]

    return generate
