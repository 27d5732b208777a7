"""A kept process answers, raises what its function raised, and ends with the process that started it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from labkit import cells
from labkit.servers import Server
from tests.serve.processes import left_over

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def evaluator():
    server = Server("builtins:eval", {"LABKIT_TRIED": "yes"})
    yield server
    server._stop()


def test_it_answers_in_its_own_process_and_environment(evaluator):
    pid, value = evaluator.request("(__import__('os').getpid(), __import__('os').environ['LABKIT_TRIED'])", timeout=30)
    assert pid != os.getpid() and value == "yes" and "LABKIT_TRIED" not in os.environ
    assert evaluator.request("__import__('os').getpid()", timeout=30) == pid, "it should have been kept"


def test_tensors_travel_both_ways(evaluator):
    x = torch.arange(4.0)[::2]
    assert torch.equal(evaluator.request("x * 2", {"x": x}, timeout=30), x * 2)


def test_what_the_function_raises_is_raised_here(evaluator):
    with pytest.raises(ZeroDivisionError, match="division"):
        evaluator.request("1 // 0", timeout=30)
    with pytest.raises(RuntimeError, match="process of builtins:eval died"):
        evaluator.request("__import__('os')._exit(3)", timeout=30)
    assert evaluator.request("1 + 1", timeout=30) == 2


def test_a_fork_uses_the_same_process_and_does_not_end_it(evaluator):
    pid = evaluator.request("__import__('os').getpid()", timeout=30)
    assert cells.forked(lambda: evaluator.request("__import__('os').getpid()", timeout=30), 30) == pid
    assert evaluator.request("__import__('os').getpid()", timeout=30) == pid


def test_one_that_cannot_start_says_why():
    with pytest.raises(RuntimeError, match="no_such_module:answer died: ModuleNotFoundError"):
        Server("no_such_module:answer", {}).request(timeout=5)


ABRUPT = """
import os
from labkit.servers import Server
print(Server("builtins:eval", {}).request("__import__('os').getpid()", timeout=30), flush=True)
os._exit(0)
"""


def test_it_ends_with_the_process_that_started_it_however_that_ends():
    done = subprocess.run([sys.executable, "-c", ABRUPT], capture_output=True, text=True, cwd=ROOT, check=True)
    pid = int(done.stdout)
    assert not left_over([pid], [], within=30), f"the server, process {pid}, is still there"
