"""The input buffers of captured graphs: made once, at the largest size, and only ever copied into."""

from __future__ import annotations

from collections.abc import Sequence as Sized

import torch

from labkit.engine.attention import Step
from labkit.engine.scheduler import Chunk

PADDING = (0, 0, -1, 0)  # token, position, slot, seq_len: writes nowhere, attends to nothing


class StaticBatch:
    """Room for `rows` sequences of one new token each, and for block tables of `max_blocks`.

    Each buffer has a twin in page-locked host memory, filled there and sent by one copy: a copy out of pageable memory
    would make the host wait.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device):
        pinned = device.type == "cuda"
        self._host = torch.zeros(4, rows, dtype=torch.int32, pin_memory=pinned)
        self._host_table = torch.zeros(rows, max_blocks, dtype=torch.int32, pin_memory=pinned)
        self._host[2] = -1
        self._device = self._host.to(device, copy=True)
        self._table = self._host_table.to(device, copy=True)
        self._sent: list[list[int]] = [[] for _ in range(rows)]  # what each row of the table holds

    def fill(self, chunks: Sized[Chunk], size: int, block_size: int) -> None:
        """Put the chunks into the first rows, and padding into those up to `size`."""
        host, changed = self._host.numpy(), False
        for i, chunk in enumerate(chunks):
            table, position = chunk.request.block_table, chunk.start
            slot = table[position // block_size] * block_size + position % block_size
            host[:, i] = chunk.request.tokens[position], position, slot, position + 1
            if table != self._sent[i]:
                self._host_table[i, : len(table)] = torch.tensor(table, dtype=torch.int32)
                self._sent[i], changed = list(table), True
        for i in range(len(chunks), size):
            host[:, i] = PADDING
        self._device.copy_(self._host, non_blocking=True)
        if changed:
            self._table.copy_(self._host_table, non_blocking=True)

    def rows(self, size: int) -> tuple[torch.Tensor, torch.Tensor, Step]:
        """Views of the first `size` rows: tokens, positions and where they belong."""
        tokens, positions, slots, lens = (row[:size] for row in self._device)
        return tokens, positions, Step(slots, self._table[:size], lens)
