"""Checks in a child process: the rows come back, and what ends the child is said, not suffered."""

from pathlib import Path

import pytest

from labkit.cells import run_cell
from labkit.checks import check, isolate, questions_of

SOLUTIONS = sorted((Path(__file__).parents[2] / "solutions").glob("*/*.nb.py"))

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


def test_every_answer_that_is_checked_apart_is_a_function():
    """A class has no source that can be carried into another process: on a GPU its question would earn nothing."""
    for path in SOLUTIONS:
        text = path.read_text(encoding="utf-8")
        for question in questions_of(path.parent.name):
            if question.launches_kernels:
                assert f"\ndef {question.id}(" in text, f"{question.id} is no function, so set launches_kernels=False"
