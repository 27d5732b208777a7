"""Hidden checks of lab 1: the bug hunt.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

from grading.blackbox import Remote, hidden_check, require

LAB = "lab1_paged_attention"


def judged(fault: str) -> str:
    """Driver: does the student's test accept a table with this fault? Faulty tables are made here, at grading time."""
    import torch

    class Table:
        def __init__(self, max_seqs, max_model_len, block_size):
            width = -(-max_model_len // block_size) - (fault == "narrow" and max_model_len % block_size > 0)
            self.table = torch.zeros(max_seqs, width, dtype=torch.int32)

        def refill(self, block_tables):
            old = self.table.clone()
            if fault == "moves":
                self.table = self.table.clone()
            self.table.zero_()
            for row, blocks in enumerate(block_tables):
                for column, block in enumerate(blocks[: self.table.shape[1]]):
                    self.table[row, column] = block
            if fault == "first column" and (old[:, 0] > 0).any():
                self.table[:, 0] = torch.where(old[:, 0] > 0, old[:, 0], self.table[:, 0])
            if fault == "tail":
                self.table[:, 1:] = torch.where(self.table[:, 1:] > 0, self.table[:, 1:], old[:, 1:])
            if fault == "departed":
                self.table[len(block_tables) :] = old[len(block_tables) :]

    try:
        block_table_test(Table)
    except Exception as error:
        return type(error).__name__
    return "accepted"


@hidden_check(LAB, "block_table_test")
def sound_and_narrow(remote: Remote) -> None:
    require(remote.call(judged, "none") == "accepted", "the test rejects a sound table")
    require(remote.call(judged, "narrow") != "accepted", "the test accepts a table that is too narrow")


@hidden_check(LAB, "block_table_test")
def sound_and_stale(remote: Remote) -> None:
    require(remote.call(judged, "none") == "accepted", "the test rejects a sound table")
    for fault in ("first column", "tail", "departed"):
        require(remote.call(judged, fault) != "accepted", f"the test accepts a table that is stale ({fault})")


def table_log(sizes: list[int], steps: list) -> list:
    """Driver: refill a StaticBlockTable step by step; gives each table, and whether the tensor stayed in place."""
    made = StaticBlockTable(*sizes)
    address, log = made.table.data_ptr(), []
    for step in steps:
        made.refill(step)
        log.append(made.table.tolist())
    return [log, made.table.data_ptr() == address, str(made.table.dtype)]


@hidden_check(LAB, "static_block_table")
def every_refill_is_fresh(remote: Remote) -> None:
    steps = [[[1, 2, 3, 4, 5]], [[6], [7, 8]], [], [[9, 9, 9], [1], [2, 3, 4]], [[5]]]
    log, stayed, dtype = remote.call(table_log, [4, 33, 8], steps)
    for step, table in zip(steps, log, strict=True):
        want = [blocks + [0] * (len(table[0]) - len(blocks)) for blocks in step]
        want += [[0] * len(table[0])] * (4 - len(step))
        require(table == want, f"after refill({step}): {table}")
    require(stayed, "the tensor moved")
    require(dtype == "torch.int32", f"the table has dtype {dtype}")


@hidden_check(LAB, "static_block_table")
def exact_multiples_fit(remote: Remote) -> None:
    log, _, _ = remote.call(table_log, [1, 4096, 256], [[list(range(1, 17))]])
    require(
        log[0][0][:16] == list(range(1, 17)), "4,096 tokens in blocks of 256: the 16 blocks do not all stand in the row"
    )
