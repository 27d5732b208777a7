"""Streamed requests to an OpenAI-compatible server, and what is recorded of each.

Time runs on this side: a token's time is when the chunk that holds it was read, as in vLLM's own benchmark. vLLM adds
token ids to each chunk (`return_token_ids`), so a chunk of several tokens counts as several, at one time.
"""

from __future__ import annotations

import http.client
import itertools
import json
import operator
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from labkit.serve.values import is_number

TIMEOUT_S = 300.0  # between two chunks
BROKEN = (ValueError, KeyError, TypeError, AttributeError)  # of a chunk that is no JSON, or JSON of another shape
Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Record:
    """A request and its answer. Times in seconds from the start of the run, lengths in tokens.

    arrival: when it was to be sent; sent: when it was. token_times: one for each generated token. cached: tokens of the
    prompt that were found in the prefix cache. queue, prefill, decode: durations as the engine measured them, from
    queued to first scheduled, to first token, to last token. All three and `cached` are None where the server does not
    say. logprobs: of the generated tokens, where they were asked for. error: why there is no answer, or "".
    """

    id: int
    arrival: float
    sent: float
    token_times: tuple[float, ...] = ()
    token_ids: tuple[int, ...] = ()
    text: str = ""
    prompt_len: int = 0
    prompt_ids: tuple[int, ...] = ()
    cached: int | None = None
    queue: float | None = None
    prefill: float | None = None
    decode: float | None = None
    finish_reason: str | None = None
    error: str = ""
    logprobs: tuple[float, ...] | None = None

    @property
    def ok(self) -> bool:
        """Whether it got an answer of at least one token."""
        return not self.error and bool(self.token_times)

    @property
    def ttft(self) -> float:
        """Time to first token: from sending to the first token. Includes the queue and the whole prefill."""
        return self._times[0] - self.sent

    @property
    def itls(self) -> tuple[float, ...]:
        """Inter-token latencies: the gaps between one token and the next, one fewer than there are tokens."""
        times = self._times
        return tuple(after - before for before, after in itertools.pairwise(times))

    @property
    def tpot(self) -> float:
        """Time per output token after the first: the mean gap; 0 for an answer of one token."""
        times = self._times
        return (times[-1] - times[0]) / (len(times) - 1) if len(times) > 1 else 0.0

    @property
    def e2e(self) -> float:
        """End-to-end latency: from sending to the last token."""
        return self._times[-1] - self.sent

    @property
    def _times(self) -> tuple[float, ...]:
        if not self.ok:
            raise ValueError(f"request {self.id} has no answer, so no latency: {self.error or 'no token came'}")
        return self.token_times


class RequestRefused(RuntimeError):
    """The server answered a request with an error; the message is the server's."""


@dataclass
class _Answer:
    """What has come so far of a streamed answer."""

    began: float
    times: list[float] = field(default_factory=list)
    ids: list[int] = field(default_factory=list)
    text: str = ""
    logprobs: list[float] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def take(self, chunk: dict[str, Any], now: float) -> None:
        """Add one chunk that was read at `now`, seconds of time.perf_counter."""
        if error := chunk.get("error"):
            raise RequestRefused(str(error.get("message", error) if isinstance(error, dict) else error))
        if usage := chunk.get("usage"):
            details = usage.get("prompt_tokens_details") or {}
            self.facts |= {"prompt_len": usage["prompt_tokens"], "cached": details.get("cached_tokens")}
        metrics = chunk.get("metrics") or {}
        for name, key in (
            ("queue", "queue_time_ms"),
            ("prefill", "time_to_first_token_ms"),
            ("decode", "generation_time_ms"),
        ):
            if metrics.get(key) is not None:
                self.facts[name] = metrics[key] / 1000
        if chunk.get("prompt_token_ids"):  # a chat answer has them here
            self.facts["prompt_ids"] = tuple(chunk["prompt_token_ids"])
        for choice in chunk.get("choices") or ():
            self._take_choice(choice, now)

    def _take_choice(self, choice: dict[str, Any], now: float) -> None:
        if choice.get("prompt_token_ids"):
            self.facts["prompt_ids"] = tuple(choice["prompt_token_ids"])
        text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
        ids = choice.get("token_ids")
        new = list(ids) if ids is not None else [-1] if text else []  # a server that does not say: a token a chunk
        self.text += text
        self.ids += new
        self.times += [now - self.began] * len(new)
        if choice.get("finish_reason"):
            self.facts["finish_reason"] = choice["finish_reason"]
        found = choice.get("logprobs") or {}
        values = found.get("token_logprobs") or [token["logprob"] for token in found.get("content") or ()]
        self.logprobs += values if ids is None else values[max(0, len(values) - len(new)) :]  # echo has the prompt's

    def record(self, number: int, arrival: float, sent: float, error: str) -> Record:
        return Record(
            number, arrival, sent, tuple(self.times), tuple(self.ids), self.text, error=error,
            logprobs=tuple(self.logprobs) or None, **self.facts,
        )  # fmt: skip


class Client:
    """Requests to the server at `url` ("http://127.0.0.1:8000"), for the model that it serves as `model`.

    timeout: seconds between two chunks of an answer. ValueError for a url or a timeout that is none.
    """

    def __init__(self, url: str, model: str = "tiny", timeout: float = TIMEOUT_S) -> None:
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port or 80
        except (AttributeError, ValueError):  # no text; or a port that is none
            parts = urllib.parse.urlsplit("")
        if parts.scheme != "http" or not parts.hostname:
            raise ValueError(f"url must be http://host:port, and is {url!r}")
        if not (is_number(timeout) and 0 < timeout < float("inf")):
            raise ValueError(f"timeout must be a number of seconds above 0, and is {timeout!r}")
        self.url, self.model, self._timeout = url.rstrip("/"), model, timeout
        self._host, self._port = parts.hostname, port

    def complete(self, prompt: Prompt, max_tokens: int = 16, **options: Any) -> Record:
        """A completion of a text, or of token ids as they stand. options: further fields of the request's body.

        A refused or broken request gives a record whose `error` says why. ValueError for what cannot be sent.
        """
        return self.record("/v1/completions", self.completion(prompt, max_tokens, **options))

    def chat(self, messages: Sequence[dict[str, str]], max_tokens: int = 16, **options: Any) -> Record:
        """The answer to messages of the form {"role": ..., "content": ...}, put into the model's chat template."""
        return self.record("/v1/chat/completions", {"messages": list(messages), "max_tokens": max_tokens, **options})

    @staticmethod
    def completion(prompt: Prompt, max_tokens: int, **options: Any) -> dict[str, Any]:
        """The body of a completion request. ValueError for a prompt that is neither a text nor token ids."""
        try:
            sent = prompt if isinstance(prompt, str) else list(map(operator.index, prompt))
        except TypeError as error:
            raise ValueError(f"prompt must be a text or whole numbers, and is {str(prompt)[:80]} ({error})") from None
        return {"prompt": sent, "max_tokens": max_tokens, **options}

    def record(
        self, path: str, body: dict[str, Any], *, number: int = 0, arrival: float = 0.0, began: float | None = None
    ) -> Record:
        """Send a streamed request and record what comes. began: start of the run, in seconds of time.perf_counter.

        ValueError for a body that cannot be sent.
        """
        payload = payload_of({
            "model": self.model, "temperature": 0, **body, "stream": True,
            "stream_options": {"include_usage": True}, "return_token_ids": True,
        })  # fmt: skip
        sent = time.perf_counter()
        answer, error = _Answer(sent if began is None else began), ""
        try:
            done = False
            for line in self._lines("POST", path, payload):
                data = line.removeprefix(b"data:").strip()
                done = done or data == b"[DONE]"
                if line.startswith(b"data:") and not done:
                    answer.take(json.loads(data), time.perf_counter())
            if not done:  # http.client takes a connection that was cut for the end of the answer
                raise ConnectionError("the answer broke off")
        except (*BROKEN, OSError, http.client.HTTPException, RequestRefused) as failure:
            error = f"{type(failure).__name__}: {failure}"
        return answer.record(number, arrival, sent - answer.began, error)

    def tokenize(self, text: str, add_special_tokens: bool = False) -> list[int]:
        """The token ids of a text, by the server's tokenizer."""
        return self.post("/tokenize", {"model": self.model, "prompt": text, "add_special_tokens": add_special_tokens})[
            "tokens"
        ]

    def metrics(self) -> dict[str, float]:
        """A snapshot of /metrics: each sample's value, summed over its labels, and by label where it has a `reason`.

        Buckets of histograms are left out. Names are vLLM's: "vllm:num_preemptions_total", for instance.
        The labels of "vllm:cache_config_info" that are numbers come as "cache_config:<label>".
        """
        from prometheus_client.parser import text_string_to_metric_families

        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.get("/metrics")):
            for sample in family.samples:
                if sample.name == "vllm:cache_config_info":
                    found |= {f"cache_config:{k}": float(v) for k, v in sample.labels.items() if _is_number(v)}
                if sample.name.endswith(("_bucket", "_created")):
                    continue
                found[sample.name] = found.get(sample.name, 0.0) + sample.value
                if reason := sample.labels.get("reason") or sample.labels.get("finished_reason"):
                    found[f"{sample.name}:{reason}"] = sample.value
        return found

    def get(self, path: str) -> str:
        """The text at a path. RequestRefused, OSError."""
        return b"".join(self._lines("GET", path, None)).decode("utf-8")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        """What the server answers to a JSON body. RequestRefused, OSError."""
        return json.loads(b"".join(self._lines("POST", path, payload_of(body))))

    def _lines(self, method: str, path: str, payload: bytes | None) -> Iterator[bytes]:
        connection = http.client.HTTPConnection(self._host, self._port, timeout=self._timeout)
        try:
            connection.request(method, path, payload, {"Content-Type": "application/json"})
            reply = connection.getresponse()
            if reply.status != 200:
                raise RequestRefused(f"{reply.status} {reply.reason}: {_message(reply.read())}")
            yield from reply
        finally:
            connection.close()


def payload_of(body: dict[str, Any]) -> bytes:
    """A request's body as JSON. ValueError if it is none, or asks for several answers: a record holds one."""
    if body.get("n") not in (None, 1):
        raise ValueError(f"n must be 1, since a record holds one answer, and is {body['n']!r}")
    try:
        return json.dumps(body).encode("utf-8")
    except TypeError as error:
        raise ValueError(f"the fields of a request must be JSON: {error}") from None


def _message(body: bytes) -> str:
    """The server's message in the body of an error."""
    try:
        found = json.loads(body)
        return str(found.get("error", found).get("message", found))[:400]
    except (ValueError, AttributeError):
        return body.decode("utf-8", errors="replace")[:400]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
