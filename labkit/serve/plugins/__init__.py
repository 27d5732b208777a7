"""What the camp adds to vLLM through its entry points, with no patched source: scheduler, attention, records, limits.

vLLM loads them by name wherever the camp is installed (`[project.entry-points]` in pyproject.toml), in each of its
processes. What is not asked for changes nothing: everything is switched on by an environment variable, since that
reaches all of vLLM's processes.

- LABKIT_POLICY: the order of admission, a name of `policies.POLICIES` or `module:function`; with `--scheduler-cls` and
  the name in SCHEDULER.
- LABKIT_ATTENTION: attention through `kernels` or through `module:function`; on CUDA with `--attention-backend CUSTOM`.
- LABKIT_RECORDS: a folder for one row a request and one a step.
- VLLM_PLUGINS: vLLM's own list of the plugins that may load; limits are served over HTTP only if LIMITS is in it.
"""

from __future__ import annotations

import os

POLICY, ATTENTION, RECORDS = "LABKIT_POLICY", "LABKIT_ATTENTION", "LABKIT_RECORDS"
SCHEDULER = "labkit.serve.plugins.scheduler.PolicyScheduler"
PLUGINS = ("labkit", "labkit_records")
LIMITS = "labkit_limits"


def register() -> None:
    """The entry point of `vllm.general_plugins`; called in each of vLLM's processes, maybe more than once."""
    if os.environ.get(ATTENTION):
        from labkit.serve.plugins import attention

        attention.register()
    if LIMITS in os.environ.get("VLLM_PLUGINS", "").split(","):
        from labkit.serve.plugins import limits

        limits.register()


def environment(
    *, policy: str | None = None, attention: str | None = None, records: str | None = None, limits: bool = False
) -> dict[str, str]:
    """The environment variables that switch these on in a server; see above. limits: over HTTP."""
    asked = {POLICY: policy, ATTENTION: attention, RECORDS: records}
    chosen = {name: value for name, value in asked.items() if value is not None}
    return chosen | {"VLLM_PLUGINS": ",".join([*PLUGINS, *([LIMITS] if limits else [])])}
