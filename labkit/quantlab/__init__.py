"""What lab 3 experiments on: one real attention head, and the arithmetic model with other weights put in."""

from labkit.quantlab.head import Head, load_head
from labkit.quantlab.live import perplexity, smollm2
from labkit.quantlab.recorded import recorded_quality, recorded_unquantized
from labkit.quantlab.swap import fold_model, linear_inputs, linears, with_weights

__all__ = [
    "Head",
    "fold_model",
    "linear_inputs",
    "linears",
    "load_head",
    "perplexity",
    "recorded_quality",
    "recorded_unquantized",
    "smollm2",
    "with_weights",
]
