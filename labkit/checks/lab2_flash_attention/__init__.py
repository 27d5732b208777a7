"""Public checks of lab 2, FlashAttention."""

from labkit.checks.lab2_flash_attention import bugs, first_kernels, flash, machine, numerics, races

QUESTIONS = [
    *first_kernels.QUESTIONS,
    *numerics.QUESTIONS,
    *flash.QUESTIONS,
    *machine.QUESTIONS,
    *bugs.QUESTIONS,
    *races.QUESTIONS,
]
