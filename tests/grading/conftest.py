from __future__ import annotations

from pathlib import Path

import pytest
import toy

from grading.course import Course


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A fresh toy course: built, no submissions."""
    return toy.make_course(tmp_path / "course")


def pytest_terminal_summary(terminalreporter) -> None:
    left_out = [
        item for item in terminalreporter.stats.get("deselected", []) if item.nodeid.startswith("tests/grading")
    ]
    if left_out:
        names = ", ".join(sorted({item.nodeid.rpartition("::")[2] for item in left_out}))
        terminalreporter.write_line(f"GRADING: {len(left_out)} slow rows were left out (-m slow runs them): {names}")
