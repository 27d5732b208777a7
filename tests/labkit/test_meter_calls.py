"""What is measured runs in a child: its results, its errors and its end come back, and nothing else is changed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from metered import copy, softmax, softmax_twice

from labkit.meter import Call, measure, measure_many
from labkit.triton_internals import observe


def test_launches_are_counted_by_python_call_and_by_kernel():
    count = measure(softmax_twice, torch.randn(3, 8))
    assert count.launches == 3
    assert {name: t.launches for name, t in count.kernels.items()} == {"softmax_kernel": 2, "copy_kernel": 1}


def test_several_calls_are_counted_apart_in_one_child():
    x, y = torch.randn(33), torch.randn(4, 4)
    first, second = measure_many([Call(copy, (x, torch.empty(33))), Call(softmax, (y,))])
    assert (first.bytes_loaded, second.bytes_loaded) == (33 * 4, 64)
    assert list(second.kernels) == ["softmax_kernel"]


def test_tensors_that_share_memory_still_share_it_in_the_child():
    memory = torch.arange(20.0)
    measure(copy, memory[:10], memory[10:])
    assert torch.equal(memory[10:], memory[:10])


def unsolved(x):
    raise NotImplementedError


def columns(x):
    return x.shape[1]


def crooked(x):
    return columns(x[0])


def crash(x):
    os.kill(os.getpid(), signal.SIGKILL)


def sleeper(x):
    time.sleep(60)


def test_an_error_of_the_call_comes_back_with_its_type_and_its_line():
    with pytest.raises(NotImplementedError):
        measure(unsolved, torch.zeros(1))
    with pytest.raises(IndexError, match=r"out of range \(at `.*x.shape\[1\]"):
        measure(crooked, torch.zeros(2, 2))


def test_a_crash_or_a_hang_in_the_child_costs_nothing_here():
    with pytest.raises(RuntimeError, match="died"):
        measure(crash, torch.zeros(1))
    with pytest.raises(TimeoutError):
        measure_many([Call(sleeper, (torch.zeros(1),))], timeout=0.5)


def talkative(x):
    print("hello from the child")


def test_what_the_call_prints_is_printed(capsys):
    measure(talkative, torch.zeros(1))
    assert capsys.readouterr().out == "hello from the child\n"


def test_a_process_of_its_own_counts_the_same_as_a_fork(monkeypatch):
    monkeypatch.setattr("labkit.meter.calls._can_fork", lambda: False)
    x, out = torch.randn(100), torch.zeros(128)[::2][:50]
    count = measure(softmax, x[None])
    assert (count.bytes_loaded, count.launches) == (400, 1)
    began = time.perf_counter()
    assert measure(copy, x[::2].contiguous(), out.contiguous()).bytes_loaded == 200
    assert time.perf_counter() - began < 3, "the process should have been kept warm"
    with pytest.raises(RuntimeError, match="died"):
        measure(crash, x)
    assert measure(copy, x, torch.zeros(100)).bytes_stored == 400


def test_the_interpreter_is_left_alone_in_this_process():
    measure(copy, torch.zeros(8), torch.zeros(8))
    from triton.runtime import interpreter

    assert interpreter.GridExecutor.__call__.__module__ == "triton.runtime.interpreter"
    assert observe.__doc__ and "no way back" in observe.__doc__


IMPORTED_TOO_EARLY = """
import sys, torch, triton
import triton.language as tl
import labkit
from labkit import meter
from labkit.triton_internals import interpreting
sys.path.insert(0, sys.argv[1])
from metered import softmax
assert interpreting()
x = torch.randn(3, 5)
torch.testing.assert_close(softmax(x), x.softmax(-1))
assert meter.calls._can_fork()
print(meter.measure(softmax, x).bytes)
"""


def test_triton_may_be_imported_before_labkit_picks_the_tier():
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"} | {"CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", IMPORTED_TOO_EARLY, str(Path(__file__).parent)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "120\n", done.stderr
