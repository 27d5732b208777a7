"""The input buffers of captured graphs: made once, at the largest size, and only ever copied into."""

from __future__ import annotations

from collections.abc import Sequence as Sized

import numpy as np
import torch

from labkit.engine.ops import Step
from labkit.engine.scheduler import Chunk

PADDING = ((0,), (0,), (-1,), (0,))  # token, position, slot, seq_len: writes nowhere, attends to nothing


def staged(values: np.ndarray, device: torch.device) -> torch.Tensor:
    """int32 values ready to be copied to `device` without the host waiting: for a GPU, in page-locked memory.

    torch keeps that memory until the copy is done, so the next step may be prepared meanwhile.
    """
    tensor = torch.from_numpy(np.ascontiguousarray(values, np.int32))
    return tensor.pin_memory() if device.type == "cuda" else tensor


class StaticBatch:
    """Room for `rows` sequences of one new token each, and for block tables of `max_blocks`: all in one buffer, so
    that a step costs one copy.
    """

    def __init__(self, rows: int, max_blocks: int, device: torch.device):
        rows = -(-rows // 4) * 4  # so that all buffers are aligned to 16 bytes
        self._rows, self._max_blocks = rows, max_blocks
        self._host = np.zeros(rows * (4 + max_blocks), np.int32)
        self._columns = self._host[: 4 * rows].reshape(4, rows)
        self._columns[:] = PADDING
        self._tables = self._host[4 * rows :].reshape(rows, max_blocks)
        self._device = torch.from_numpy(self._host).to(device, copy=True)
        self._sent: list[list[int]] = [[] for _ in range(rows)]  # what each row of the table holds

    def fill(self, chunks: Sized[Chunk], size: int, block_size: int) -> None:
        """Put the chunks into the first rows, and padding into those up to `size`."""
        count, changed = len(chunks), False
        positions = [c.start for c in chunks]
        tables = [c.request.block_table for c in chunks]
        self._columns[0, :count] = [c.request.tokens[c.start] for c in chunks]
        self._columns[1, :count] = positions
        blocks = np.array([t[p // block_size] for t, p in zip(tables, positions, strict=True)], np.int32)
        self._columns[2, :count] = blocks * block_size + self._columns[1, :count] % block_size
        self._columns[3, :count] = self._columns[1, :count] + 1
        self._columns[:, count:size] = PADDING
        for i, table in enumerate(tables):
            if table != self._sent[i]:
                self._tables[i, : len(table)] = table
                self._sent[i], changed = list(table), True
        used = 4 * self._rows + (size * self._max_blocks if changed else 0)
        self._device[:used].copy_(staged(self._host[:used], self._device.device), non_blocking=True)

    def rows(self, size: int) -> tuple[torch.Tensor, Step]:
        """Views of the first `size` rows: tokens, and where they belong."""
        tokens, positions, slots, lens = (self._device[i * self._rows :][:size] for i in range(4))
        table = self._device[4 * self._rows :].view(self._rows, self._max_blocks)[:size]
        return tokens, Step(positions, slots, table, lens)
