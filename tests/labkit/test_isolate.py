"""Checks in a child process: the rows come back, and what ends the child is said, not suffered."""

import pytest

from labkit.cells import run_cell
from labkit.checks import check, isolate

KV_BYTES = """
def kv_bytes_per_token(shape, dtype_bytes=2):
    {body}
    return 2 * shape.attention_layers * shape.num_kv_heads * shape.head_dim * dtype_bytes
"""


def answer(body: str):
    namespace = {"__name__": "__main__"}
    run_cell(KV_BYTES.format(body=body), namespace, "isolated")
    return namespace["kv_bytes_per_token"]


def test_the_rows_are_those_of_a_check_in_this_process():
    right = answer("pass")
    rows = isolate.rows("kv_bytes_per_token", right)
    here = check("kv_bytes_per_token", right)
    assert [r["name"] for r in rows] == [r.name for r in here.rows]
    assert all(r["passed"] for r in rows)


def test_an_answer_that_ends_its_process_is_told_how():
    with pytest.raises(RuntimeError, match=r"your kernel ended its process \(exit code -11\)"):
        isolate.rows("kv_bytes_per_token", answer("import faulthandler; faulthandler._sigsegv()"))


def test_an_endless_answer_is_ended():
    with pytest.raises(RuntimeError, match="took longer than 8 s"):
        isolate.rows("kv_bytes_per_token", answer("while True: pass"), timeout=8)
