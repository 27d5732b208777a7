"""What a kernel question asks of the traffic: a kernel is launched, stays inside its tensors, and reads once."""

from __future__ import annotations

from typing import Any

from labkit import meter
from labkit.checks.contract import require

# What may not do a kernel's work for it, where a kernel is asked for.
TORCH_MATH = (
    "torch.softmax", "torch.einsum", "torch.matmul", "torch.mm", "torch.mv", "torch.bmm", "torch.baddbmm",
    "torch.addmm", "torch.tensordot", "torch.inner", "torch.linalg", "operator.matmul", "torch.nn.functional.softmax",
    "torch.nn.functional.linear", "torch.nn.Linear", "torch.nn.functional.scaled_dot_product_attention",
    "torch.nn.attention", "torch.ops", "numpy.dot", "numpy.matmul", "numpy.einsum", "numpy.tensordot", "numpy.inner",
    "numpy.linalg",
)  # fmt: skip


def stays_inside(answer: Any, *arguments: Any, shuffle: int | None = None, **options: Any) -> meter.Count:
    """Count a call's traffic; Failed if it launches no kernel or leaves a tensor.

    An access outside its tensor is seen and not carried out, so a kernel question begins with this: run for real, such
    an access ends the notebook's kernel. shuffle: run the programs in another order, by this seed.
    """
    count = inside(answer, *arguments, shuffle=shuffle, **options)
    require(count.launches > 0, "no Triton kernel was launched: this question asks for a kernel")
    return count


def inside(answer: Any, *arguments: Any, shuffle: int | None = None, **options: Any) -> meter.Count:
    """`stays_inside`, of a call that may also launch no kernel."""
    [count] = meter.measure_many([meter.Call(answer, arguments, options)], shuffle=shuffle)
    require(not count.outside, f"an access outside its tensor: {count.outside[0] if count.outside else ''}")
    return count


def reads_once(count: meter.Count, needed: int, most: int, what: str) -> None:
    """Failed unless between `needed` and `most` bytes were loaded. what: said when there were too many."""
    loaded = count.bytes_loaded
    require(loaded >= needed, f"the kernel loads {loaded:,} bytes, and what it must look at has {needed:,}")
    require(loaded <= most, f"the kernel loads {loaded:,} bytes where {most:,} are enough: {what}")
