"""What a step asks of torch, operation by operation, as its dispatcher sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from labkit.engine import Engine, EngineConfig, ModelConfig, SamplingParams, random_weights


@dataclass(frozen=True)
class Op:
    """One operation. name: torch's, such as "mm" or "add_".

    reads, gives: the memory of its tensor arguments and of its results, a number for each storage; a result that lies
    in the memory of an argument has that argument's number. in_place: whether it writes into an argument.
    """

    name: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    in_place: bool = False


class _Recorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Op] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func._schema.name.split("::")[1]
        in_place = func._schema.is_mutable and torch.Tag.inplace_view not in func.tags  # squeeze_ writes no value
        self.ops.append(Op(name, _storages((args, kwargs)), _storages(out), in_place))
        return out


def record_ops(work: Callable[[], Any]) -> list[Op]:
    """Run `work` and list the operations it asked for, in their order."""
    with _Recorder() as recorder:
        work()
    return recorder.ops


def _storages(tree: Any) -> tuple[int, ...]:
    return tuple(t.untyped_storage().data_ptr() for t in tree_leaves(tree) if isinstance(t, torch.Tensor))


def decode_step(num_layers: int, batch: int = 4, context: int = 20) -> Callable[[], Any]:
    """A decode step of our engine, eagerly, on a tiny Qwen3 of this depth on the CPU, in plain torch operations.

    Each call makes the next token of `batch` requests whose prompts had `context` tokens; up to 200 calls.
    """
    config = ModelConfig("qwen3", 97, 32, 48, num_layers, 4, 2, 16, 512, qk_norm=True)
    options = EngineConfig(  # "padded": no graph, and the work that a graph would hold
        graphs="padded", capture_sizes=(batch,), max_num_seqs=batch, max_num_batched_tokens=max(512, batch * context)
    )
    engine = Engine(config, random_weights(config, torch.float32, "cpu"), options)
    for number in range(batch):
        engine.add([1 + number] * context, SamplingParams(max_tokens=200, ignore_eos=True))
    engine.step()  # the prompts
    return engine.step
