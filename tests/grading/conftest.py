from __future__ import annotations

import functools
from pathlib import Path

import nbgrader.api
import pytest
import toy

from grading.course import Course


@pytest.fixture(scope="session", autouse=True)
def _one_alembic():
    """nbgrader asks `alembic` for its version with each new gradebook, which takes seconds; here once."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nbgrader.api, "get_alembic_version", functools.cache(nbgrader.api.get_alembic_version))
        yield


@pytest.fixture
def course(tmp_path: Path) -> Course:
    """A fresh toy course: built, no submissions."""
    return toy.make_course(tmp_path / "course")


def pytest_terminal_summary(terminalreporter) -> None:
    deselected = terminalreporter.stats.get("deselected", [])
    rows = [i for i in deselected if i.nodeid.startswith("tests/grading") and i.get_closest_marker("slow")]
    if rows:
        names = ", ".join(sorted({i.callspec.id if hasattr(i, "callspec") else i.name for i in rows}))
        terminalreporter.write_line(f"GRADING: {len(rows)} slow rows were left out (-m slow runs them): {names}")
