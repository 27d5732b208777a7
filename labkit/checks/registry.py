"""Finds a question by its id. Lab packages register on import, so that a lab costs nothing until it is asked for."""

from __future__ import annotations

import importlib
import pkgutil

import labkit.checks
from labkit.checks.contract import Question

_found: dict[str, Question] = {}


def _load() -> dict[str, Question]:
    if not _found:
        for module in sorted(m.name for m in pkgutil.iter_modules(labkit.checks.__path__) if m.name.startswith("lab")):
            for question in importlib.import_module(f"labkit.checks.{module}").QUESTIONS:
                if question.id in _found:
                    raise ValueError(f"question id {question.id!r} is declared twice")
                _found[question.id] = question
    return _found


def find_question(question: str) -> Question:
    """The question with this id; KeyError names the ids that exist."""
    found = _load()
    if question not in found:
        raise KeyError(f"no question {question!r}; there are: {', '.join(sorted(found))}")
    return found[question]


def questions_of(lab: str) -> list[Question]:
    """The questions of a lab, in the order of declaration."""
    return [q for q in _load().values() if q.lab == lab]
