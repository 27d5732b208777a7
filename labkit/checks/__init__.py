"""The check contract: `check(question, answer)` gives a result, `score(result, points)` gives a plain float.

A question is a list of named invariants, each worth its share. Each lab declares its questions in a package of its own
beside this file; a question is found by its id, which is unique in the whole camp.
"""

from labkit.checks.contract import Failed, Question, Result, Row, require
from labkit.checks.registry import find_question, questions_of
from labkit.checks.running import check, score

__all__ = ["Failed", "Question", "Result", "Row", "check", "find_question", "questions_of", "require", "score"]
