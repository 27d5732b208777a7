"""Limits of a running server, read and changed over HTTP: how many requests run at once, how many tokens a step takes.

GET /labkit/limits gives them with what the engine is doing; POST {"max_num_active_reqs": 4} changes one. Lowering the
first drains: what runs goes on, nothing is preempted. The route is served only where VLLM_PLUGINS names it.
"""

from __future__ import annotations

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


class Limits:
    """The endpoint plugin: an entry point of `vllm.endpoint_plugins` is a callable that gives one."""

    name = "labkit_limits"
    required_tasks = None

    def __init__(self) -> None:
        self._engine: Any = None

    def attach_router(self, app: Any) -> None:
        """Add the route to vLLM's FastAPI application."""
        from fastapi import Request
        from fastapi.responses import JSONResponse

        async def limits(request: Request) -> JSONResponse:
            try:
                wanted = await request.json() if request.method == "POST" else {}
            except ValueError:
                wanted = None
            if not isinstance(wanted, dict):
                return JSONResponse({"error": "expected a JSON object: limit -> number"}, status_code=400)
            answer = await self._engine.engine_core.call_utility_async(UTILITY, wanted)
            return JSONResponse(answer, status_code=400 if "error" in answer else 200)

        limits.__annotations__ = {"request": Request}  # FastAPI reads them, and here they are strings of local names
        app.add_api_route(PATH, limits, methods=["GET", "POST"])

    async def init_state(self, engine_client: Any, state: Any, args: Any) -> None:
        """Called by vLLM once the engine is there."""
        self._engine = engine_client
