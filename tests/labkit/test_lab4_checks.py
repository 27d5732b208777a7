"""What the checks of lab 4 do with answers that a mutant cannot be."""

import time

import pytest

import labkit
from labkit.checks.contract import Failed
from labkit.checks.lab4_cuda_graphs import buckets
from labkit.checks.lab4_cuda_graphs.cases import within


def test_a_search_without_an_end_is_stopped_and_named(monkeypatch):
    monkeypatch.setattr(buckets, "SEARCH_S", 0.1)

    def bucket_ladder(histogram, memory, capture_s, row_s, budget):
        while len(memory) == 40:
            pass
        return sorted(memory)

    said = str(labkit.check("bucket_ladder", bucket_ladder))
    assert "no answer within 0.1 s: 40 sizes have a million million subsets" in said


def test_an_alarm_is_put_off_and_an_error_passes():
    with pytest.raises(ZeroDivisionError), within(0.05, "slow"):
        _ = 1 / 0
    with within(0.05, "slow"):
        pass
    time.sleep(0.1)
    with pytest.raises(Failed, match=r"no answer within 0\.05 s: slow"), within(0.05, "slow"):
        time.sleep(5)


def test_a_captured_step_with_a_buffer_for_its_output_is_right():
    class CapturedStep:
        def __init__(self, step, examples, capture):
            self.buffers = [e.clone() for e in examples]
            self.out = step(*self.buffers).clone()
            self.graph = capture(lambda: (self.out.copy_(step(*self.buffers)),))

        def __call__(self, *inputs):
            for n, buffer in enumerate(self.buffers):
                if n >= len(inputs) or (inputs[n].shape, inputs[n].dtype) != (buffer.shape, buffer.dtype):
                    raise ValueError(f"input {n}")
            for buffer, value in zip(self.buffers, inputs, strict=True):
                buffer.copy_(value)
            self.graph.replay()
            return self.out.clone()

    result = labkit.check("captured_step", CapturedStep)
    assert result.fraction == 1, str(result)
