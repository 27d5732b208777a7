"""The toy camp as a fixture, in place of the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from labkit import workspace
from labkit.checks import registry
from tests.cli.toy import Camp, toy_notebook, toy_questions


@pytest.fixture
def camp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Camp:
    toy = Camp(tmp_path / "camp")
    toy.release.parent.mkdir(parents=True)
    toy.release.write_text(toy_notebook(), encoding="utf-8")
    monkeypatch.setattr(workspace, "camp_root", lambda: toy.root)
    monkeypatch.setattr(registry, "_found", {q.id: q for q in toy_questions()})
    for variable in ("LABKIT_WORK", "LABKIT_STUDENT"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.chdir(tmp_path)
    return toy
