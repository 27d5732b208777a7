"""A real vLLM server: started, watched and loaded, its capacity planned, its records kept.

Nothing here imports vLLM, so the package is light enough for vLLM's own processes, which load our plugins from it.
"""

from labkit.serve.client import Client, Record, RequestRefused
from labkit.serve.launch import Launch
from labkit.serve.load import SLO, Run, random_prompts, read_run, run_load, save_run
from labkit.serve.log import LogFacts, failure_reason, read_log
from labkit.serve.plan import Inconsistent, Plan, plan_capacity, shape_of
from labkit.serve.server import Server, StartFailed

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
    "StartFailed",
    "failure_reason",
    "plan_capacity",
    "random_prompts",
    "read_log",
    "read_run",
    "run_load",
    "save_run",
    "shape_of",
]
