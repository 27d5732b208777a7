"""Limits of a running server, read and changed over HTTP: how many requests run at once, how many tokens a step takes.

GET /labkit/limits gives them with what the engine is doing; POST {"max_num_active_reqs": 4} changes one. Lowering the
first drains: what runs goes on, nothing is preempted. The route is served only where VLLM_PLUGINS names it.
"""

from __future__ import annotations

import json
from typing import Any

PATH = "/labkit/limits"
UTILITY = "labkit_limits"


def register() -> None:
    """In each of vLLM's processes: the engine core gets the method that the server's process calls by name."""
    from vllm.v1.engine.core import EngineCore

    setattr(EngineCore, UTILITY, _in_core)


def _in_core(core: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Runs in the engine core's process, between two steps."""
    return change(core.scheduler, wanted)


def change(scheduler: Any, wanted: dict[str, Any]) -> dict[str, Any]:
    """Set limits of a scheduler and give all of them, with what it is doing.

    wanted: limit -> number. Either all of them are set or, when {"error": sentence} comes back, none: an exception in
    the engine core would end the server.
    """
    most = {
        "max_num_active_reqs": scheduler.max_num_running_reqs,
        "max_num_scheduled_tokens": scheduler.scheduler_config.max_num_batched_tokens,
    }
    limits = [name for name in most if hasattr(scheduler, name)]  # the first came after vLLM 0.26
    for name, value in wanted.items():
        if name not in limits:
            return {"error": f"{name}: no such limit; there are {', '.join(limits)}"}
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= most[name]:
            return {"error": f"{name}: expected a whole number from 1 to {most[name]}, got {value!r}"}
    for name, value in wanted.items():
        setattr(scheduler, name, value)
    doing = {
        "running": len(scheduler.running),
        "waiting": len(scheduler.waiting),
        "kv_usage": scheduler.kv_cache_manager.usage,
    }
    return {name: getattr(scheduler, name) for name in limits} | doing


class _JsonResponse:
    """An ASGI response: vLLM brings a web framework, and one class of it is no reason to depend on it by name."""

    def __init__(self, answer: dict[str, Any]) -> None:
        self._status = 400 if "error" in answer else 200
        self._body = json.dumps(answer).encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        headers = [(b"content-type", b"application/json"), (b"content-length", str(len(self._body)).encode())]
        await send({"type": "http.response.start", "status": self._status, "headers": headers})
        await send({"type": "http.response.body", "body": self._body})


class Limits:
    """The endpoint plugin: an entry point of `vllm.endpoint_plugins` is a callable that gives one."""

    name = "labkit_limits"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's FastAPI application."""
        app.add_route(PATH, self._answer, methods=["GET", "POST"])

    async def _answer(self, request: Any) -> _JsonResponse:
        try:
            wanted = await request.json() if request.method == "POST" else {}
        except (ValueError, RecursionError):
            wanted = None
        if not isinstance(wanted, dict):
            return _JsonResponse({"error": "expected a JSON object: limit -> number"})
        return _JsonResponse(await self._engine.engine_core.call_utility_async(UTILITY, wanted))

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called by vLLM once the engine is there."""
        self._engine = engine_client
