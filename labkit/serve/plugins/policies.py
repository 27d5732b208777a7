"""Policies of admission: which waiting request comes next. Functions of what is known when it waits, and no vLLM."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Waiting:
    """A request that waits to be admitted. prompt_tokens, max_tokens: tokens. waited: seconds since it arrived."""

    id: str
    prompt_tokens: int
    max_tokens: int
    waited: float


Policy = Callable[[Waiting], Any]
"""Gives a sort key: the request with the smallest is admitted first; equal ones stay in order of arrival."""

POLICIES: dict[str, Policy] = {
    "fcfs": lambda request: 0,
    "shortest_prompt": lambda request: request.prompt_tokens,
    "shortest_job": lambda request: request.prompt_tokens + request.max_tokens,
    "longest_prompt": lambda request: -request.prompt_tokens,
}


def policy_named(name: str) -> Policy:
    """A policy of POLICIES, or the function at `module:name`. ValueError for a name that is neither."""
    if name in POLICIES:
        return POLICIES[name]
    module, _, function = str(name).partition(":")
    if not (module and function):
        raise ValueError(f"policy: expected one of {', '.join(POLICIES)}, or module:function, and got {name!r}")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"policy: {name!r} cannot be imported: {error}") from error
    if not callable(found):
        raise ValueError(f"policy: {name!r} is no function, but {found!r}")
    return found
