"""Schedulers without a GPU: small exact runs whose tokens can be compared, and replays of whole traces.

`drive` runs a scheduler over a toy model whose tokens depend on every block it reads. `replay` plays a trace of
thousands of requests in counted steps, each as long as its bytes and launches take on one GPU.
"""

from labkit.simulate.cost import LADDER, QWEN3_8B_ON_H200, StepCost
from labkit.simulate.drive import Step, Stuck, beside_prompts, drive, roomy
from labkit.simulate.in_engine import EngineRun, run_in_engine
from labkit.simulate.jobs import Blocks, Chunk, Job, NoRoom, PagedModel, alone, make_jobs
from labkit.simulate.policies import Policy, fcfs, known, predicted, prioritised, rank_correlation, shortest, similar
from labkit.simulate.replay import DEMO_SERVER, Replay, Server, Shown, busy_hour, replay
from labkit.simulate.traffic import DEMO, Served, Ticket, chat_traffic, with_state

__all__ = [
    "DEMO",
    "DEMO_SERVER",
    "LADDER",
    "QWEN3_8B_ON_H200",
    "Blocks",
    "Chunk",
    "EngineRun",
    "Job",
    "NoRoom",
    "PagedModel",
    "Policy",
    "Replay",
    "Served",
    "Server",
    "Shown",
    "Step",
    "StepCost",
    "Stuck",
    "Ticket",
    "alone",
    "beside_prompts",
    "busy_hour",
    "chat_traffic",
    "drive",
    "fcfs",
    "known",
    "make_jobs",
    "predicted",
    "prioritised",
    "rank_correlation",
    "replay",
    "roomy",
    "run_in_engine",
    "shortest",
    "similar",
    "with_state",
]
