"""A scheduler whose order of admission is a function: vLLM's own, with its waiting queue put in order before each step.

Subclassing vLLM's scheduler is supported (`--scheduler-cls`), its inside is not a stable interface: what is used of it
stands in `contract`.
"""

from __future__ import annotations

import os
import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.request_queue import FCFSRequestQueue

from labkit.serve import plugins
from labkit.serve.plugins.policies import Policy, Waiting, policy_named


class PolicyScheduler(AsyncScheduler):
    """vLLM's scheduler with an admission policy: `admission` of the class, else the one that LABKIT_POLICY names.

    Of AsyncScheduler, which a GPU's engine insists on and a CPU's runs as well. Preempted requests come first whatever
    the policy: they have waited once, and their answers have begun. admitted: ids in order of first admission.
    """

    admission: Policy | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        if not isinstance(self.waiting, FCFSRequestQueue):
            raise ValueError("PolicyScheduler orders vLLM's first-come queue: leave --scheduling-policy at fcfs")
        self._key = type(self).admission or policy_named(os.environ.get(plugins.POLICY, "fcfs"))
        self.admitted: list[str] = []

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """One step: the waiting queue in the policy's order, then vLLM's own choice of what to run."""
        queue: Any = self.waiting  # a deque, as __init__ has made sure
        if len(queue) > 1:
            now = time.time()  # as Request.arrival_time is
            ordered = sorted(queue, key=lambda request: self._place(request, now))
            queue.clear()
            queue.extend(ordered)
        output = super().schedule(*args, **kwargs)
        self.admitted += [request.req_id for request in output.scheduled_new_reqs]
        return output

    def _place(self, request: Any, now: float) -> tuple[bool, Any]:
        if request.num_preemptions:
            return False, 0
        waited = max(0.0, now - request.arrival_time)
        return True, self._key(Waiting(request.request_id, request.num_prompt_tokens, request.max_tokens, waited))


def with_policy(policy: Policy) -> type[PolicyScheduler]:
    """A scheduler class for `LLM(scheduler_cls=...)` in this very process, where a function need have no name."""
    return type("PolicyScheduler", (PolicyScheduler,), {"admission": staticmethod(policy)})
