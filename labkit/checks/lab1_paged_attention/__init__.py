"""Public checks of lab 1."""

from labkit.checks.lab1_paged_attention import sizes

QUESTIONS = [*sizes.QUESTIONS]
