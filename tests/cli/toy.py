"""A toy camp of one lab with two questions."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner, Result

from labkit import cli
from labkit.checks import Question, require

LAB = "lab1_toy"
SOLVED = {"double": "def double(x):\n    return 2 * x", "triple": "def triple(x):\n    return double(x) + x"}
STARTER = {q: f"def {q}(x):\n    raise NotImplementedError" for q in SOLVED}


def code(source: str, **nbgrader) -> dict:
    meta = {"nbgrader": nbgrader} if nbgrader else {}
    return {"cell_type": "code", "metadata": meta, "source": source, "outputs": [], "execution_count": None}


def toy_notebook(answers: dict[str, str] = STARTER, without: tuple[str, ...] = (), extra: str = "x = 1") -> str:
    """The toy lab's notebook: a setup cell, per question its answer, check and hidden cell, and one cell more."""
    cells = [code("import labkit", grade_id="setup", grade=False, locked=True, solution=False)]
    for question, source in answers.items():
        score = f"labkit.score(labkit.check('{question}', {question}), points=2)"
        cells += [
            code(source, grade_id=question, grade=False, locked=False, solution=True),
            code(score, grade_id=f"{question}_check", grade=True, locked=True, solution=False, points=2),
            code("# more", grade_id=f"{question}_hidden", grade=True, locked=True, solution=False, points=1),
        ]
    kept = [c for c in cells if c["metadata"].get("nbgrader", {}).get("grade_id") not in without]
    return json.dumps({"cells": [*kept, code(extra)], "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


@dataclass(frozen=True)
class Camp:
    """The toy camp's folders, and its command line."""

    root: Path

    @property
    def release(self) -> Path:
        return self.root / "labs" / LAB / f"{LAB}.ipynb"

    @property
    def mine(self) -> Path:
        return self.root / "work" / LAB / f"{LAB}.ipynb"

    def run(self, *words: str) -> Result:
        return CliRunner().invoke(cli.app, list(words))

    def write_mine(self, text: str) -> None:
        self.mine.parent.mkdir(parents=True, exist_ok=True)
        self.mine.write_text(text, encoding="utf-8")


def toy_questions() -> list[Question]:
    double, triple = Question("double", LAB, "numbers are doubled"), Question("triple", LAB, "numbers are tripled")
    for question, factor in ((double, 2), (triple, 3)):

        @question.invariant("one is right")
        def _(answer, factor=factor):
            require(answer(1) == factor, f"{factor} times 1 is {factor}")

        @question.invariant("two is right")
        def _(answer, factor=factor):
            require(answer(2) == 2 * factor, f"{factor} times 2 is {2 * factor}")

    return [double, triple]


def one_line(result: Result, words: str) -> None:
    """The command refused with exit code 2 and one line on stderr that holds `words`."""
    assert result.exit_code == 2, result.output
    assert words in result.stderr and result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("labkit: ") and "Traceback" not in result.output
