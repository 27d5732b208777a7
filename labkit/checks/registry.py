"""Finds a question by its id. The labs' packages are imported when the first question is asked for, not before."""

from __future__ import annotations

import importlib
import pkgutil

import labkit.checks
from labkit.checks.contract import Question

_found: dict[str, Question] = {}


def _questions() -> dict[str, Question]:
    """Every declared question by id. An error leaves nothing behind, so that the next call says the same."""
    if not _found:
        _found.update(_declared())
    return _found


def _declared() -> dict[str, Question]:
    found: dict[str, Question] = {}
    for module in sorted(m.name for m in pkgutil.iter_modules(labkit.checks.__path__) if m.name.startswith("lab")):
        for question in importlib.import_module(f"labkit.checks.{module}").QUESTIONS:
            if question.id in found:
                raise ValueError(f"question id {question.id!r} is declared twice")
            found[question.id] = question
    return found


def find_question(question: str) -> Question:
    """The question with this id; KeyError names the ids that exist."""
    found = _questions()
    if question not in found:
        raise KeyError(f"no question {question!r}; there are: {', '.join(sorted(found))}")
    return found[question]


def questions_of(lab: str) -> list[Question]:
    """The questions of a lab, in the order of declaration. KeyError names the labs that have some."""
    found = [q for q in _questions().values() if q.lab == lab]
    if not found:
        known = sorted({q.lab for q in _questions().values()})
        raise KeyError(f"no questions for lab {lab!r}; there are: {', '.join(known)}")
    return found
