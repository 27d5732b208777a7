"""Kernels are tested on the GPU where there is one, else in Triton's interpreter, whose bf16 arithmetic is broken."""

import os

import pytest
import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

FLOATS = (torch.float16, torch.float32) + ((torch.bfloat16,) if torch.cuda.is_available() else ())


@pytest.fixture(autouse=True)
def seeded():
    """A test's random numbers do not depend on which tests ran before it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture(params=FLOATS, ids=lambda dtype: str(dtype).removeprefix("torch."))
def dtype(request) -> torch.dtype:
    return request.param
