"""A really started vLLM: ready, measured, stopped; and killed half way with the process that started it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from labkit import device, workload
from labkit.benchmarks.vllm import write_config
from labkit.models import QWEN3_8B, tiny_path
from labkit.serve import Launch, Server, StartFailed, plan_capacity, run_load
from labkit.serve.server import free_port
from tests.serve.processes import files, folder_of, left_over

ROOT = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: no server can be started")


def tiny(**options) -> Launch:
    return Launch(tiny_path(), **{"max_model_len": 512, "block_size": 32, "kv_cache_memory": 8 << 20, **options})


def test_a_server_keeps_its_plan_answers_a_load_and_leaves_nothing(capsys):
    launch = tiny()
    plan = plan_capacity(tiny_path(), launch)
    with Server(launch) as server:
        assert "ready after" in capsys.readouterr().out
        assert server.facts.kv_tokens == pytest.approx(plan.kv_tokens, rel=0.05)
        assert server.facts.max_concurrency == pytest.approx(plan.max_concurrency, rel=0.05)
        client = server.client()
        assert client.metrics()["cache_config:num_gpu_blocks"] == plan.blocks
        chat = client.chat([{"role": "user", "content": "Hello"}], 6, logprobs=True)
        assert chat.ok and chat.logprobs is not None and len(chat.logprobs) == len(chat.token_ids) > 0, chat.error
        requests = workload.make_requests(
            12, prompt=workload.constant(40), output=workload.constant(8), arrivals=workload.poisson_arrivals(30)
        )
        run = run_load(client, requests, show=False)
        assert run.summary()["failed"] == 0
        for record in run.records:
            assert len(record.token_ids) == 8 and record.prompt_len == 40
            assert record.queue is not None and record.prefill is not None and record.decode is not None
            inside = record.queue + record.prefill
            assert inside < record.ttft, f"the engine's {inside} s are part of the client's {record.ttft} s"
        again = client.complete(list(run.records[0].prompt_ids), 2)
        assert again.cached == 32, "40 tokens were cached, of which a block of 32 can be found again"
        port, pids = server.port, server.pids()
        paths, began = files(pids), time.monotonic()
        assert len(pids) >= 3 and any("labkit-serve-" in path for path in paths)
    assert time.monotonic() - began < 10, "a server stops within seconds"
    assert not server.alive and not left_over(pids, paths, within=1)
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that ended linger for a minute
        probe.bind(("127.0.0.1", port))


@pytest.mark.skipif(device.tier() != "cuda", reason="there is no GPU here: what is left of one cannot be planned for")
def test_what_a_gpu_has_left_is_planned_within_five_percent(tmp_path):
    """Activations and graphs are estimates there; weights are of random numbers, in the shape of Qwen3-8B."""
    launch = Launch(
        write_config(QWEN3_8B, tmp_path), max_model_len=8192, more=("--load-format", "dummy", "--skip-tokenizer-init")
    )
    plan = plan_capacity(QWEN3_8B, launch, memory=torch.cuda.mem_get_info()[1], device="cuda")
    with Server(launch) as server:
        facts = server.facts
    assert facts.kv_tokens == pytest.approx(plan.kv_tokens, rel=0.05), f"planned {plan}"
    assert facts.max_concurrency == pytest.approx(plan.max_concurrency, rel=0.05)


KILLED = """
import json, os, sys, threading, time
from labkit.serve import Launch, Server
from tests.serve.processes import files
server = Server(Launch(sys.argv[1], max_model_len=512, kv_cache_memory=8 << 20), show=False)
threading.Thread(target=server.start, daemon=True).start()
while "with config" not in server.log:
    time.sleep(0.05)
print(json.dumps([server.pids(), sorted(files(server.pids()))]), flush=True)
os.kill(os.getpid(), 9)
"""


def test_nothing_is_left_of_a_server_whose_owner_is_killed_while_it_starts():
    command = [sys.executable, "-c", KILLED, str(tiny_path())]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=120, cwd=ROOT)
    pids, paths = json.loads(done.stdout)
    assert done.returncode == -9 and len(pids) >= 3, "guard, server and engine were to run"
    assert any("labkit-serve-" in path for path in paths)
    assert not left_over(pids, paths), "a server outlived the process that wanted it"


# What a server of vLLM does as far as `Server` sees it: it takes the port, says so, answers, and ends when asked to.
STAND_IN = """
import http.server, subprocess, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
try:
    server = http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health)
except OSError as error:
    sys.exit(f"OSError: {error}")
if "with a child" in sys.argv:
    subprocess.Popen(["sleep", "60"])
print("Available routes are:", flush=True)
server.serve_forever()
"""


@dataclass(frozen=True)
class StandIn(Launch):
    """Starts it in no time, and no vLLM."""

    def command(self, port: int) -> list[str]:
        return [sys.executable, "-c", STAND_IN, str(port), self.served_name]


def test_a_port_that_somebody_takes_before_the_server_does_is_given_up_for_another(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ports = [taken.getsockname()[1], free_port()]
        monkeypatch.setattr("labkit.serve.server.free_port", lambda: ports.pop(0))
        with Server(StandIn("m"), show=False) as server:
            assert server.alive and not ports and server.port != taken.getsockname()[1]


def test_a_folder_without_a_tokenizer_is_refused_unless_none_is_wanted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer_config.json").write_text("{}")
    with pytest.raises(StartFailed, match="there is no tokenizer in the folder"):
        Server(StandIn(tmp_path), show=False).start()
    with Server(StandIn(tmp_path, more=("--skip-tokenizer-init",)), show=False) as server:
        assert server.alive
    (tmp_path / "tokenizer.json").write_text("{}")
    with Server(StandIn(tmp_path), show=False) as server, Server(StandIn(tmp_path), show=False) as other:
        assert server.alive and other.alive and server.port != other.port


def test_a_server_that_never_gets_a_port_gives_up(monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        monkeypatch.setattr("labkit.serve.server.free_port", lambda: taken.getsockname()[1])
        with pytest.raises(StartFailed, match="the port is taken"):
            Server(StandIn("m"), show=False).start()


def test_a_server_that_has_died_can_be_started_again():
    server = Server(StandIn("m"), show=False).start()
    try:
        os.kill(server.pids()[-1], 9)
        until = time.monotonic() + 5
        while server.alive and time.monotonic() < until:
            time.sleep(0.05)
        assert not server.alive
        with server:
            assert server.alive, "a dead server was taken for one that runs"
            with pytest.raises(RuntimeError, match="runs already"):
                server.start()
    finally:
        server.stop()


def test_a_guard_that_hangs_does_not_keep_the_server(monkeypatch):
    monkeypatch.setattr("labkit.serve.server.STOP_S", 0.5)
    server = Server(StandIn("m"), show=False).start()
    pids = server.pids()
    os.kill(pids[0], signal.SIGSTOP)
    server.stop()
    assert not left_over(pids, [])


def test_a_log_that_somebody_holds_open_does_not_keep_the_owner(monkeypatch):
    """Both guards killed at one instant: what the server had started may stay, and writes to the same log."""
    monkeypatch.setattr("labkit.serve.server.REST_S", 0.2)
    server = Server(StandIn("m", served_name="with a child"), show=False).start()
    first, second, *_, child = server.pids()
    folder = folder_of(child)
    for pid, number in ((first, signal.SIGSTOP), (second, signal.SIGKILL), (first, signal.SIGKILL)):
        os.kill(pid, number)
    try:
        began = time.monotonic()
        server.stop()
        assert time.monotonic() - began < 3
    finally:
        os.kill(child, signal.SIGKILL)
        shutil.rmtree(folder)


@pytest.mark.slow
def test_a_taken_port_is_said():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        server = Server(tiny(), port=taken.getsockname()[1], show=False)
        with pytest.raises(StartFailed, match="the port is taken"):
            server.start()
    assert not server.alive and server.pids() == []


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"kv_cache_memory": 1 << 18}, "too little KV memory"),
        ({"block_size": 16}, "block_size 16 is none that the attention backend CPU_ATTN"),
        ({"max_model_len": 100_000}, "more than the 2048.0 positions"),
        ({"quantization": "awq"}, "quantization awq was asked for"),
        ({"more": ("--nonsense",)}, "does not know the arguments --nonsense"),
    ],
)
def test_a_start_that_fails_says_why(options, said):
    with pytest.raises(StartFailed, match=said):
        Server(tiny(**options), show=False).start()


@pytest.mark.slow
def test_a_missing_model_is_said():
    with pytest.raises(StartFailed, match="there is no model in the folder /nonexistent"):
        Server(Launch("/nonexistent", kv_cache_memory=8 << 20), show=False).start()


@pytest.mark.parametrize("port", [0, -1, 65536, "80", True, 80.0])
def test_a_port_is_one_that_there_is(port):
    with pytest.raises(ValueError, match="port must be a whole number from 1 to 65535"):
        Server(Launch("m"), port=port)
    with pytest.raises(ValueError, match=r"launch must be a labkit\.serve\.Launch"):
        Server("m")  # type: ignore[arg-type]


def test_a_server_that_was_not_started_stops_quietly_and_has_no_address():
    server = Server(tiny())
    server.stop()
    with pytest.raises(RuntimeError, match="no port before it is started"):
        server.url  # noqa: B018
    assert 0 < free_port() < 65536
