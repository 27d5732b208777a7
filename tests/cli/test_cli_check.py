"""`labkit check`: the student's own cells, each question in a process of its own, with no Jupyter package."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.toy import LAB, SOLVED, STARTER, one_line, toy_notebook

ROOT = Path(__file__).resolve().parents[2]


def verdicts(result) -> dict[str, dict]:
    return {v["question"]: v for v in json.loads(result.stdout)["questions"]}


def test_a_solved_notebook_is_all_well(camp):
    camp.write_mine(toy_notebook(SOLVED))
    result = camp.run("check", "lab1")
    assert result.exit_code == 0, result.output
    assert "4 of 4" in result.stdout and "+ 2" in result.stdout and "interpreter" in result.stdout


def test_an_untouched_notebook_is_not_solved(camp):
    camp.write_mine(toy_notebook())
    result = camp.run("check", "lab1", "--json")
    assert result.exit_code == 1
    assert {v["status"] for v in verdicts(result).values()} == {"not solved"}
    shown = camp.run("check", "lab1").stdout
    assert "not solved" in shown and "NotImplementedError" not in shown, "the table says it, once"
    assert "NotImplementedError" in camp.run("check", "lab1", "--question", "double").stdout


def test_a_half_right_answer_says_what_is_wrong_and_where(camp):
    camp.write_mine(toy_notebook(SOLVED | {"double": "def double(x):\n    return 2"}))
    result = camp.run("check", "lab1")
    assert result.exit_code == 1
    assert "2 times 2 is 4" in result.stdout and "partial" in result.stdout and "1 of 2" in result.stdout


def test_json_is_all_that_is_printed(camp):
    noisy = "print('hello')\nimport os, sys\nos.write(1, b'raw')\nos.write(2, b'raw')\n" + SOLVED["double"]
    camp.write_mine(
        toy_notebook(SOLVED | {"double": noisy.replace("import os, sys\n", "").replace("os.write", "print")})
    )
    result = camp.run("check", "lab1", "--json")
    report = json.loads(result.stdout)
    assert report["notebook"] == str(camp.mine) and report["tier"] == "interpreter" and report["all_well"] is True
    assert report["questions"][0]["possible"] == 2.0 and report["questions"][0]["hidden"] == 1.0
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        ("def double(x):\n    return 2 *", "SyntaxError|plain Python"),
        ("import math\n1 / 0", "ZeroDivisionError"),
        ("def double(x):\n    raise SystemExit", "SystemExit"),
        ("import signal\ndef double(x):\n    signal.raise_signal(9)", "the process died \\(SIGKILL\\)"),
        ("import time\ndef double(x):\n    time.sleep(60)", "no result after 5 s"),
        ("def double(x):\n    return eval('2 * x')", "`eval` may not be used in this answer"),
    ],
)
def test_trouble_in_one_answer_costs_that_question_alone(camp, answer, words):
    import re

    camp.write_mine(toy_notebook({"double": answer, "triple": "def triple(x):\n    return 3 * x"}))
    result = camp.run("check", "lab1", "--json", "--timeout", "5" if "sleep" in answer else "60")
    assert result.exit_code == 1
    found = verdicts(result)
    assert found["double"]["status"] == "failed" and re.search(words, found["double"]["said"]), found["double"]
    assert found["triple"]["status"] == "passed"


def test_an_edited_or_deleted_check_cell_changes_nothing(camp):
    wrong = {q: f"def {q}(x):\n    return 0" for q in SOLVED}
    camp.write_mine(toy_notebook(wrong).replace("labkit.score(labkit.check('double', double), points=2)", "2.0"))
    assert verdicts(camp.run("check", "lab1", "--json"))["double"]["earned"] == 0.0
    camp.write_mine(toy_notebook(SOLVED, without=("setup", "triple_check")))
    assert camp.run("check", "lab1").exit_code == 0


def test_an_import_added_to_the_setup_cell_is_there_for_the_answers(camp):
    answers = SOLVED | {"double": "def double(x):\n    return operator.mul(x, 2)"}
    camp.write_mine(toy_notebook(answers).replace("import labkit", "import labkit\\nimport operator", 1))
    result = camp.run("check", "lab1")
    assert result.exit_code == 0, result.stdout


def test_a_deleted_answer_is_missing_and_the_rest_is_checked(camp):
    camp.write_mine(toy_notebook(SOLVED, without=("triple",)))
    result = camp.run("check", "lab1", "--json")
    assert result.exit_code == 1
    assert {q: v["status"] for q, v in verdicts(result).items()} == {"double": "passed", "triple": "missing"}
    assert "copy it from a newer release: triple" in camp.run("check", "lab1").stdout


def test_one_question_can_be_checked_alone_and_shows_its_rows(camp):
    camp.write_mine(toy_notebook(SOLVED | {"triple": STARTER["triple"]}))
    result = camp.run("check", "lab1", "--question", "double")
    assert result.exit_code == 0 and "one is right" in result.stdout and "triple" not in result.stdout


def test_a_notebook_file_is_checked_where_it_lies(camp, tmp_path):
    path = tmp_path / "elsewhere.ipynb"
    path.write_text(toy_notebook(SOLVED))
    assert camp.run("check", "elsewhere.ipynb").exit_code == 0
    assert camp.run("check", str(path)).exit_code == 0


def test_the_solution_is_checked_for_maintainers_only(camp):
    one_line(camp.run("check", "lab1", "--solution"), "--solution is for maintainers")
    solved = camp.root / "solutions" / LAB / f"{LAB}.ipynb"
    solved.parent.mkdir(parents=True)
    solved.write_text(toy_notebook(SOLVED))
    assert camp.run("check", "lab1", "--solution").exit_code == 0
    one_line(camp.run("check", "x.ipynb", "--solution"), "--solution goes with a lab")


# one clear line


def test_no_working_copy_is_one_line(camp):
    one_line(camp.run("check", "lab1"), f"make it with `labkit start {LAB}`, or name a notebook file")


def test_a_renamed_working_copy_is_named(camp):
    camp.write_mine(toy_notebook())
    camp.mine.rename(camp.mine.with_name("mine.ipynb"))
    one_line(camp.run("check", "lab1"), "was it renamed? There is: mine.ipynb")


def test_a_file_that_is_not_there_is_one_line(camp):
    one_line(camp.run("check", "nowhere.ipynb"), "no notebook nowhere.ipynb")


@pytest.mark.parametrize("text", ["", "{", "[]", '{"cells": 3}', "\x00\xff"])
def test_a_broken_notebook_is_one_line(camp, text):
    camp.mine.parent.mkdir(parents=True)
    camp.mine.write_text(text, encoding="latin-1")
    one_line(camp.run("check", "lab1"), f"{camp.mine} is not a readable notebook")


def test_a_notebook_without_questions_is_one_line(camp, tmp_path):
    (tmp_path / "plain.ipynb").write_text('{"cells": []}')
    one_line(camp.run("check", "plain.ipynb"), "plain.ipynb is no lab")


def test_a_notebook_of_an_unknown_question_is_one_line(camp, tmp_path):
    (tmp_path / "odd.ipynb").write_text(toy_notebook(SOLVED).replace("double", "quadruple"))
    one_line(camp.run("check", "odd.ipynb"), "no question 'quadruple'; there are: double, triple")


def test_an_unknown_question_is_one_line(camp):
    camp.write_mine(toy_notebook())
    one_line(camp.run("check", "lab1", "--question", "nope"), "no question 'nope'; there are: double, triple")


def test_a_missing_tier_is_one_line(camp, monkeypatch):
    from labkit import device

    monkeypatch.setattr(device, "tier", lambda: "interpreter")
    camp.write_mine(toy_notebook(SOLVED))
    one_line(camp.run("check", "lab1", "--device", "cuda"), "--device cuda: torch finds no CUDA device here")
    one_line(camp.run("check", "lab1", "--device", "tpu"), "--device 'tpu': auto, cuda or cpu")
    assert camp.run("check", "lab1", "--device", "cpu").exit_code == 0


def test_no_jupyter_package_is_needed(camp):
    """The real command in a Python where every Jupyter package, matplotlib and ipywidgets fail to import."""
    setup = "import matplotlib.pyplot as plt\\nfrom IPython.display import HTML\\nfrom labkit import plots, widgets\\n"
    setup += "import labkit\\nfigure = plt.figure()\\nfigure.gca().plot([1])\\n"
    solved = SOLVED | {"double": "def double(x):\n    assert figure\n    return 2 * x"}
    camp.write_mine(toy_notebook(solved).replace("import labkit", setup, 1))
    block = (
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "gone = {'IPython', 'ipykernel', 'ipywidgets', 'jupyter_client', 'jupyter_core', 'jupyter_server',"
        " 'jupyterlab', 'jupytext', 'matplotlib', 'nbclient', 'nbconvert', 'nbformat', 'nbgrader'}\n"
        "class Finder(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.split('.')[0] in gone else super().find_spec(name, path, target)\n"
        "sys.meta_path[sys.meta_path.index(PathFinder)] = Finder\n"
        f"sys.path.insert(0, {str(ROOT)!r})\n"
        "from labkit.checks import Question, registry\n"
        "q = Question('double', 'lab1_toy', ''); q.invariant('x')(lambda f: None if f(2) == 4 else 1 / 0)\n"
        "registry._found = {'double': q, 'triple': q}\n"
        "from labkit.cli import main; main()\n"
    )
    command = [sys.executable, "-c", block, "check", str(camp.mine), "--question", "double"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "200"})
    assert done.returncode == 0, done.stderr
    assert "passed" in done.stdout
