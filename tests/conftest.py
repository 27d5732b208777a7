"""What a run left out is said at its end, with the reason: a missing GPU is no silence."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(r.longrepr[2]) if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"LEFT OUT: {count} tests, because: {reason.removeprefix('Skipped: ')}")


@pytest.fixture(scope="session")
def smollm2() -> tuple[Any, Any]:
    """SmolLM2 in bf16 and its tokenizer, for tests marked smollm2. Not to be changed: take a deep copy."""
    import torch

    from labkit.models import ModelMissing, load_model

    try:
        return load_model("smollm2", dtype=torch.bfloat16)
    except ModelMissing as error:
        pytest.skip(str(error))
