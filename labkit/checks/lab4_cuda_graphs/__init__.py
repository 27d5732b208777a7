"""Public checks of lab 4, CUDA graphs and the engine around them."""

from labkit.checks.lab4_cuda_graphs import buckets, counting, recording, tables

QUESTIONS = [*counting.QUESTIONS, *recording.QUESTIONS, *buckets.QUESTIONS, *tables.QUESTIONS]
