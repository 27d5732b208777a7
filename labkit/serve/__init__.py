"""A real vLLM server: started, watched and loaded, its capacity planned, its records kept.

Nothing here imports vLLM, so the package is light enough for vLLM's own processes, which load our plugins from it. Its
names are imported when they are first used: the sandbox of a lab masks the modules that hold an answer, not the others.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from labkit.serve.client import Client, Record, RequestRefused
    from labkit.serve.config import shape_of
    from labkit.serve.launch import Launch
    from labkit.serve.load import SLO, Run, random_prompts, read_run, run_load, save_run
    from labkit.serve.log import LogFacts, failure_reason, read_log
    from labkit.serve.plan import Inconsistent, Plan, plan_capacity
    from labkit.serve.recording import Session, Timeline, read_recording
    from labkit.serve.server import Server, StartFailed

_MODULES = {
    "client": ("Client", "Record", "RequestRefused"),
    "config": ("shape_of",),
    "launch": ("Launch",),
    "load": ("SLO", "Run", "random_prompts", "read_run", "run_load", "save_run"),
    "log": ("LogFacts", "failure_reason", "read_log"),
    "plan": ("Inconsistent", "Plan", "plan_capacity"),
    "recording": ("Session", "Timeline", "read_recording"),
    "server": ("Server", "StartFailed"),
}
_HOME = {name: module for module, names in _MODULES.items() for name in names}

__all__ = [
    "SLO",
    "Client",
    "Inconsistent",
    "Launch",
    "LogFacts",
    "Plan",
    "Record",
    "RequestRefused",
    "Run",
    "Server",
    "Session",
    "StartFailed",
    "Timeline",
    "failure_reason",
    "plan_capacity",
    "random_prompts",
    "read_log",
    "read_recording",
    "read_run",
    "run_load",
    "save_run",
    "shape_of",
]


def __getattr__(name: str) -> Any:
    """A name of this package, imported on first use."""
    if name in _HOME:
        return getattr(importlib.import_module(f"labkit.serve.{_HOME[name]}"), name)
    raise AttributeError(f"module 'labkit.serve' has no attribute {name!r}")
