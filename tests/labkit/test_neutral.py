"""labkit.checks.neutral: what a notebook, or another answer, has set in torch costs no answer a point."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from labkit.checks import Question, check, registry, require
from labkit.checks.neutral import neutral


@pytest.fixture
def changed():
    """A notebook that has changed what can be; afterwards all is as it was."""
    with neutral():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
        torch.use_deterministic_algorithms(True, warn_only=True)
        np.seterr(all="raise")
        yield


def test_an_answer_is_checked_with_the_defaults_and_the_notebook_keeps_its_own(changed, monkeypatch):
    q = Question("linear", "lab", "it is a linear layer")
    monkeypatch.setattr(registry, "_found", {q.id: q})

    @q.invariant("weights of float32 get a gradient")
    def _(answer):
        made = answer()
        made(torch.ones(2, 3)).sum().backward()
        require(made.weight.dtype == torch.float32 and made.weight.grad.device.type == "cpu", f"{made.weight}")
        require(float(np.float32(1) / np.float32(0)) == np.inf, "dividing by zero raised")
        require(not torch.are_deterministic_algorithms_enabled(), "deterministic algorithms only")

    result = check("linear", lambda: torch.nn.Linear(3, 1))
    assert result.fraction == 1, str(result)
    assert torch.zeros(1).dtype == torch.float64 and torch.zeros(1).device.type == "meta"
    assert not torch.is_grad_enabled() and torch.is_deterministic_algorithms_warn_only_enabled()
    assert np.geterr()["divide"] == "raise"


def test_what_an_answer_sets_is_gone_when_the_next_is_checked():
    with neutral():
        torch.set_default_dtype(torch.float64)
        torch.set_default_device("meta")
        torch.set_grad_enabled(False)
    assert torch.zeros(1).dtype == torch.float32 and torch.zeros(1).device.type == "cpu" and torch.is_grad_enabled()
