"""The plugins in a real server, loaded by name."""

from __future__ import annotations

import http.client
import json
from importlib.util import find_spec

import pytest

from labkit import models
from labkit.serve import Launch, Server, plugins

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not find_spec("vllm"), reason="vLLM is not installed: no server can be started"),
]


def ask(server: Server, method: str, body: dict | None = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=30)
    connection.request(method, "/labkit/limits", json.dumps(body) if body is not None else None)
    answer = connection.getresponse()
    return answer.status, json.loads(answer.read())


def test_a_server_has_the_policy_the_records_and_limits_over_http(tmp_path):
    from labkit.serve.plugins import records

    switched_on = plugins.environment(policy="shortest_prompt", records=str(tmp_path / "records"), limits=True)
    launch = Launch(
        str(models.tiny_path()),
        max_model_len=256,
        max_num_seqs=8,
        block_size=32,
        kv_cache_memory=2**24,
        scheduler=plugins.SCHEDULER,
        plugins=(*plugins.PLUGINS, plugins.LIMITS),
        environment=switched_on,
    )
    with Server(launch, show=False) as server:
        status, found = ask(server, "GET")
        assert status == 200 and found["max_num_active_reqs"] == 8, found
        assert ask(server, "POST", {"max_num_active_reqs": 2})[1]["max_num_active_reqs"] == 2
        status, refused = ask(server, "POST", {"max_num_active_reqs": 99})
        assert status == 400 and "from 1 to 8" in refused["error"]
        assert server.client().complete("one two three", max_tokens=4).ok
    rows = records.read(tmp_path / "records", records.REQUESTS)
    assert len(rows) == 1 and rows[0]["output_tokens"] == 4
