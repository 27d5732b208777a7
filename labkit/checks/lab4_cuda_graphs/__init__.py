"""Public checks of lab 4, CUDA graphs and the engine around them."""

from labkit.checks.lab4_cuda_graphs import (
    aborting,
    buckets,
    counting,
    headroom,
    predicting,
    preempting,
    recording,
    stepping,
    tables,
)

QUESTIONS = [
    *counting.QUESTIONS,
    *recording.QUESTIONS,
    *buckets.QUESTIONS,
    *tables.QUESTIONS,
    *stepping.QUESTIONS,
    *preempting.QUESTIONS,
    *headroom.QUESTIONS,
    *predicting.QUESTIONS,
    *aborting.QUESTIONS,
]
