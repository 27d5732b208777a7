"""The client and the load generator against a small server that streams as vLLM does, and vLLM's own figures."""

from __future__ import annotations

import _thread
import json
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec

import numpy as np
import pytest

from labkit.serve import SLO, Client, Record, RequestRefused, Run, random_prompts, read_run, run_load, save_run
from labkit.serve.client import _Answer
from labkit.workload import Request


class Streaming(BaseHTTPRequestHandler):
    """Answers max_tokens tokens, 5 ms apart, the last two in one chunk; prompt [0] is refused, [1] breaks off.

    [2] comes to a standstill after its first token, and [3] is answered by something else than choices.
    """

    protocol_version = "HTTP/1.1"

    def handle_one_request(self) -> None:
        try:
            super().handle_one_request()
        except ConnectionError:  # a client that has read enough is gone
            self.close_connection = True

    def do_GET(self) -> None:
        text = (
            b"# TYPE vllm:num_preemptions counter\n"
            b'vllm:num_preemptions_total{engine="0",model_name="tiny"} 3.0\n'
            b'vllm:cache_config_info{block_size="32",cache_dtype="auto"} 1.0\n'
        )
        self.send_response(200)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["prompt"] == [0]:
            return self.send_error(400, "Bad Request")
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        n = body["max_tokens"]
        for token in range(max(n - 1, 1)):
            time.sleep(0.005)
            ids = [token] if token < n - 2 or n == 1 else [token, token + 1]
            self.chunk({"choices": [{"text": "x" * len(ids), "token_ids": ids, "prompt_token_ids": body["prompt"]}]})
            if body["prompt"] == [1]:
                self.close_connection = True
                return None
            if body["prompt"] == [2]:
                time.sleep(5)
            if body["prompt"] == [3]:
                self.chunk({"choices": [7]})
        metrics = {"queue_time_ms": 1.0, "time_to_first_token_ms": 4.0, "generation_time_ms": 5.0}
        usage = {"prompt_tokens": len(body["prompt"]), "prompt_tokens_details": {"cached_tokens": 32}}
        self.chunk({"choices": [], "usage": usage, "metrics": metrics})
        done = b"data: [DONE]\n\n"
        self.wfile.write(f"{len(done):x}\r\n".encode() + done + b"\r\n0\r\n\r\n")
        return None

    def chunk(self, value: dict) -> None:
        data = f"data: {json.dumps(value)}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def client() -> Iterator[Client]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Streaming) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield Client(f"http://127.0.0.1:{server.server_port}", timeout=10)
        server.shutdown()
        thread.join()


def test_every_token_has_a_time_and_chunks_of_two_count_as_two(client):
    record = client.complete([7, 8, 9], max_tokens=5)
    assert record.ok and record.token_ids == (0, 1, 2, 3, 4) and record.text == "xxxxx"
    assert len(record.itls) == 4 and record.itls[-1] == 0
    assert record.ttft >= 0.004 and record.e2e >= 0.016, "four pauses of 5 ms lie before the last chunk"
    assert record.e2e == pytest.approx(record.ttft + sum(record.itls))
    assert record.tpot == pytest.approx(sum(record.itls) / 4)
    assert (record.prompt_len, record.cached, record.prompt_ids) == (3, 32, (7, 8, 9))
    assert (record.queue, record.prefill, record.decode) == (0.001, 0.004, 0.005)


def test_what_goes_wrong_is_in_the_record_and_in_no_latency(client):
    refused, broken = client.complete([0]), client.complete([1], max_tokens=4)
    assert "400" in refused.error and not refused.ok and not broken.ok and "broke off" in broken.error
    with pytest.raises(ValueError, match="has no answer, so no latency"):
        refused.ttft  # noqa: B018
    assert Run((refused,), 1.0).summary()["failed"] == 1 and Run((refused,), 1.0).goodput(SLO(ttft=9)) == 0


def test_a_standstill_and_an_answer_of_another_shape_are_errors_of_the_record(client):
    late = Client(client.url, timeout=1).complete([2], 3)
    assert late.error == "TimeoutError: timed out" and len(late.token_times) == 1 and not late.ok
    strange = client.complete([3], 3)
    assert strange.error.startswith("AttributeError") and not strange.ok


def test_an_error_in_the_stream_is_said_in_the_servers_words():
    for error in ({"message": "the moon is full"}, "the moon is full"):
        with pytest.raises(RequestRefused, match=r"^the moon is full$"):
            _Answer(0.0).take({"error": error}, 1.0)


def test_log_probabilities_of_the_prompt_are_left_out():
    answer = _Answer(0.0)
    choice = {"text": "abc d", "token_ids": [4], "logprobs": {"token_logprobs": [None, -1.0, -2.0, -0.5]}}
    answer.take({"choices": [choice]}, 1.0)
    assert answer.record(0, 0.0, 0.0, "").logprobs == (-0.5,), "with echo the prompt's come in front"


def test_nobody_listening_is_an_error_of_the_record():
    assert "refused" in Client("http://127.0.0.1:9").complete("x").error.lower()
    with pytest.raises(ValueError, match="url must be"):
        Client("localhost:80")
    for url in ("http://127.0.0.1:99999", "http://127.0.0.1:x", 3, None):
        with pytest.raises(ValueError, match="url must be http://host:port"):
            Client(url)  # type: ignore[arg-type]
    for timeout in (0, -1, "3", None, True):
        with pytest.raises(ValueError, match="timeout must be a number of seconds"):
            Client("http://127.0.0.1:9", timeout=timeout)  # type: ignore[arg-type]
    with pytest.raises((RequestRefused, OSError)):
        Client("http://127.0.0.1:9").get("/health")


def test_the_loop_is_open(client):
    """Requests are sent at their times, though none is answered by then: each answer takes a second."""
    requests = [Request(i, 0.01 * i, 4, 200) for i in range(10)]
    run = run_load(client, requests, show=False)
    assert [r.id for r in run.records] == list(range(10))
    assert max(r.sent - r.arrival for r in run.records) < 0.5, "requests waited: for the answers to earlier ones?"
    assert run.records[-1].sent < run.records[0].token_times[-1], "the last one was sent after the first one's answer"


def test_a_load_of_which_a_part_fails_is_not_said_to_be_answered(client, capsys):
    requests = [Request(0, 0.0, 4, 2), Request(1, 0.0, 1, 2)]
    run_load(client, requests, prompts=[[7, 8, 9, 10], [0]])
    said = capsys.readouterr().out
    assert "1 answered, the others not (RequestRefused: 400" in said and "all answered" not in said
    run_load(client, requests[:1])
    assert "all answered" in capsys.readouterr().out


def test_requests_are_sent_in_order_of_arrival_whatever_order_they_come_in(client):
    run = run_load(client, [Request(7, 1.0, 4, 2), Request(8, 0.0, 4, 2)], prompts=[[7, 7], [8, 8]], show=False)
    assert [(r.id, r.prompt_ids) for r in run.records] == [(8, (8, 8)), (7, (7, 7))]
    assert run.records[0].sent < 0.5, "an early request waited for a late one that stands before it in the list"


ONE = [Request(0, 0.0, 4, 2)]


@pytest.mark.parametrize(
    ("requests", "options", "said"),
    [
        ([], {}, "requests: there is nothing to send"),
        ([Request(0, -1.0, 4, 2)], {}, "requests: an arrival must be 0 seconds or later, and number 0"),
        ([*ONE, Request(1, float("nan"), 4, 2)], {}, "requests: an arrival .* number 1"),
        (ONE, {"prompts": "text"}, "prompts must be a list of 1"),
        (ONE, {"prompts": 5}, "prompts must be a list of 1"),
        (ONE, {"prompts": [[1], [2]]}, "prompts must be a list of 1"),
        (ONE, {"prompts": [None]}, "prompts, of request number 0: prompt must be a text or whole numbers, and is None"),
        (ONE, {"prompts": [[1.5]]}, "prompt must be a text or whole numbers"),
        (ONE, {"prompts": [["a"]]}, "prompt must be a text or whole numbers"),
        (ONE, {"max_concurrency": 0}, "max_concurrency must be a whole number"),
        (ONE, {"vocab_size": 3}, "vocab_size must be a whole number of at least 4"),
        (ONE, {"logit_bias": object()}, "the fields of a request must be JSON"),
        (ONE, {"n": 2, "temperature": 1}, "n must be 1, since a record holds one answer"),
    ],
)
def test_a_load_that_cannot_be_sent_is_refused_before_it_begins(client, requests, options, said, monkeypatch):
    monkeypatch.setattr(client, "record", lambda *_, **__: pytest.fail("something was sent"))
    with pytest.raises(ValueError, match=said):
        run_load(client, requests, show=False, **options)


def test_what_waits_for_a_slot_is_not_sent_after_an_interrupt(client, monkeypatch):
    sent = []

    def record(path, body, *, number, **times):
        sent.append(number)
        if number == 0:
            _thread.interrupt_main()
        time.sleep(0.2)

    monkeypatch.setattr(client, "record", record)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt):
            run_load(client, [Request(i, 0.0, 4, 6) for i in range(3)], max_concurrency=1, show=False)
    finally:
        signal.signal(signal.SIGINT, before)
    time.sleep(0.5)
    assert sent == [0], "an interrupted load went on"


def test_a_limit_of_requests_under_way_holds(client):
    run = run_load(client, [Request(i, 0.0, 4, 6) for i in range(6)], max_concurrency=2, show=False)
    spans = [(r.sent, r.token_times[-1]) for r in run.records]
    assert max(sum(a <= t < b for a, b in spans) for t, _ in spans) <= 2


def test_prompts_are_random_and_differ_from_the_first_token():
    prompts = random_prompts([Request(i, 0.0, 50, 1) for i in range(20)], 2048)
    assert {len(p) for p in prompts} == {50} and min(map(min, prompts)) >= 3
    assert len({tuple(p[:2]) for p in prompts}) == 20


def test_a_run_survives_the_disk(client, tmp_path):
    run = run_load(client, [Request(0, 0.0, 4, 3)], show=False)
    save_run(run, tmp_path / "run.json")
    assert read_run(tmp_path / "run.json") == run


def test_metrics_are_summed_over_labels(client):
    assert client.metrics()["vllm:num_preemptions_total"] == 3
    assert client.metrics()["cache_config:block_size"] == 32


def test_an_objective_is_kept_as_a_whole():
    record = Record(0, 0.0, 0.0, (0.125, 0.25, 0.5), (1, 2, 3))
    assert SLO(ttft=0.125, tpot=0.1875, e2e=0.5).kept_by(record)
    for slo in (SLO(ttft=0.12), SLO(tpot=0.18), SLO(e2e=0.49)):
        assert not slo.kept_by(record)
    for wrong in (0, -1, "1", True, float("nan"), [1]):
        with pytest.raises(ValueError, match="ttft must be more than 0"):
            SLO(ttft=wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="slo must be"):
        Run((record,), 1.0).goodput(0.5)  # type: ignore[arg-type]


def test_a_run_of_no_request_or_of_one_has_a_summary():
    none, one = Run((), 0.0), Run((Record(0, 0.0, 0.0, (0.5,), (1,)),), 0.5)
    assert none.summary()["requests"] == 0 and np.isnan(none.goodput(SLO())) and np.isnan(none.summary()["ttft_p99"])
    assert one.summary()["ttft_p50"] == one.summary()["ttft_p99"] == 0.5 and np.isnan(one.summary()["itl_mean"])
    assert one.goodput(SLO(tpot=1e-9)) == 2, "an answer of one token has no time per further token"
    for wrong in ((101,), (-1,), ("50",), 50):
        with pytest.raises(ValueError, match="percentiles must be numbers from 0 to 100"):
            one.summary(wrong)  # type: ignore[arg-type]


VLLMS = """
import json, sys
from vllm.benchmarks.serve import calculate_metrics
from vllm.benchmarks.lib.endpoint_request_func import RequestFuncOutput

given = json.load(sys.stdin)
outputs = [RequestFuncOutput(success=True, **o) for o in given["outputs"]]
found, _ = calculate_metrics([None] * len(outputs), outputs, given["seconds"], None, [50, 90, 99], given["goodput"])
names = ("ttft", "itl", "tpot", "e2el")
print(json.dumps({
    "mean": {n: getattr(found, f"mean_{n}_ms") for n in names},
    "percentiles": {n: getattr(found, f"percentiles_{n}_ms") for n in names},
    "request_throughput": found.request_throughput, "output_throughput": found.output_throughput,
    "request_goodput": found.request_goodput,
}))
"""


@pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: its figures cannot be asked")
def test_percentiles_and_goodput_are_those_of_vllms_benchmark():
    random = np.random.default_rng(0)
    records = []
    for i in range(200):
        gaps = random.lognormal(-4, 1, int(random.integers(1, 60)))
        sent = 0.05 * i
        records.append(Record(i, sent, sent, tuple(sent + np.cumsum(gaps)), tuple(range(len(gaps))), prompt_len=5))
    run = Run(tuple(records), max(r.token_times[-1] for r in records))
    outputs = [
        {
            "latency": r.e2e, "output_tokens": len(r.token_times), "ttft": r.ttft, "itl": list(r.itls),
            "prompt_len": r.prompt_len, "start_time": r.sent,
        }
        for r in records
    ]  # fmt: skip
    asked = {"outputs": outputs, "seconds": run.seconds, "goodput": {"ttft": 60, "tpot": 30, "e2el": 900}}
    done = subprocess.run(
        [sys.executable, "-c", VLLMS], input=json.dumps(asked), capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    theirs, ours = json.loads(done.stdout.splitlines()[-1]), run.summary((50, 90, 99))
    for name, their in {"ttft": "ttft", "itl": "itl", "tpot": "tpot", "e2e": "e2el"}.items():
        assert 1000 * ours[f"{name}_mean"] == pytest.approx(theirs["mean"][their], rel=0.01), name
        for p, value in theirs["percentiles"][their]:
            assert 1000 * ours[f"{name}_p{p:g}"] == pytest.approx(value, rel=0.01), f"{name} p{p}"
    assert ours["requests_per_s"] == pytest.approx(theirs["request_throughput"])
    assert ours["output_tokens_per_s"] == pytest.approx(theirs["output_throughput"])
    assert run.goodput(SLO(ttft=0.06, tpot=0.03, e2e=0.9)) == pytest.approx(theirs["request_goodput"])
    assert 0 < run.goodput(SLO(ttft=0.06, tpot=0.03, e2e=0.9)) < ours["requests_per_s"], "the objective tells nothing"
