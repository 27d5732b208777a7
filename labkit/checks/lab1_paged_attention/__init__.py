"""Public checks of lab 1, PagedAttention."""

from labkit.checks.lab1_paged_attention import allocator, attention, hunts, prefix, sizes

QUESTIONS = [
    *sizes.QUESTIONS[:3],
    *allocator.QUESTIONS[:2],
    *attention.QUESTIONS,
    *prefix.QUESTIONS,
    *allocator.QUESTIONS[2:],
    *sizes.QUESTIONS[3:],
    *hunts.QUESTIONS,
]
