"""Public checks of lab 1, PagedAttention."""

from labkit.checks.lab1_paged_attention import allocator, attention, hunts, prefix, sharing, sizes

QUESTIONS = [
    *sizes.QUESTIONS[:3],
    *allocator.QUESTIONS,
    *attention.QUESTIONS,
    *prefix.QUESTIONS,
    *sharing.QUESTIONS,
    *sizes.QUESTIONS[3:],
    *hunts.QUESTIONS,
]
