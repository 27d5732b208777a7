"""Public checks of lab 1, PagedAttention."""

from labkit.checks.lab1_paged_attention import allocator, attention, hunts, prefix, sharing, sizes

QUESTIONS = [
    *sizes.QUESTIONS,
    *allocator.QUESTIONS,
    *attention.QUESTIONS,
    *prefix.QUESTIONS,
    *sharing.QUESTIONS,
    *hunts.QUESTIONS,
]
