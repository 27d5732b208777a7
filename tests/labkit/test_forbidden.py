"""labkit.checks.forbidden: what an answer may not use, however it is spelled; and what it may."""

from __future__ import annotations

import functools
import linecache

import pytest

from labkit.cells import Cell
from labkit.checks import registry
from labkit.checks.contract import Question
from labkit.checks.forbidden import shipped_object, source_of, violations
from labkit.labcheck import refusal

SDPA = "torch.nn.functional.scaled_dot_product_attention"


@pytest.mark.parametrize(
    "source",
    [
        "import kernels.paged_attention",
        "import kernels.paged_attention as pa",
        "from kernels import paged_attention",
        "from kernels.paged_attention import *",
        "from labkit.block_pool import BlockPool",
        "x = labkit.block_pool.BlockPool(3)",
        "getattr(kernels, 'paged' + '_attention')",
        "getattr(x, 'y', kernels.paged_attention)",
        f"torch.nn.functional.{SDPA.rpartition('.')[2]}(q, k, v)",
        "F.scaled_dot_product_attention(q, k, v)",
        "import torch.nn.functional as nnf\nnnf.scaled_dot_product_attention(q, k, v)",
        "from torch.nn.functional import scaled_dot_product_attention as ok",
        "f = torch.nn.functional\nf.scaled_dot_product_attention(q, k, v)",
        "getattr(F, 'scaled_dot_product_attention')(q, k, v)",
        "getattr(F, name)(q, k, v)",
        "(lambda: F)().scaled_dot_product_attention(q, k, v)",
        "__import__('kernels')",
        "import importlib",
        "eval('1')",
        "exec('1')",
        "e = exec",
        "sys.modules['kernels']",
        "import sys as s\ns.modules",
        "s = sys",
        "from sys import modules",
        "sys._getframe()",
        "globals()['x']",
        "__builtins__['eval']",
        "object.__subclasses__()",
        "f.__globals__",
        "F.__dict__['x']",
        "import os\nos.popen('python')",
        "import subprocess",
        "get_ipython().run_line_magic('run', 'x')",
        "try:\n    1 / 0\nexcept Exception as e:\n    e.__traceback__.tb_frame",
        "g = getattr\ng(F, name)",
        "functools.reduce(getattr, names, F)",
        "type(lambda: 0)(compile(text, 'x', 'exec'), {})()",
        "here = locals()\nhere['labkit'].checks",
        "import string\nstring.Formatter().get_field('0.x', [F], {})",
        "from traceback import StackSummary, walk_stack",
        "import timeit\ntimeit.timeit(text)",
        "np.testing.runstring(text, {})",
        "from typing import get_type_hints",
    ],
)
def test_a_forbidden_use_is_found_however_it_is_spelled(source):
    assert violations(source, (SDPA,)), f"nothing was found in:\n{source}"


@pytest.mark.parametrize(
    "source",
    [
        "def f(q, k):\n    return torch.softmax(q @ k.mT, -1)",
        "import math\nmath.exp(1)",
        "gc = 4\ncode = gc + 1",
        "def f(kernels):\n    return len(kernels)",
        "for inspect in range(3):\n    print(inspect)",
        "x = 'import kernels'",
        "def f(x):\n    '''eval of the model'''\n    return x.evaluate",
        "getattr(shape, 'head_dim')",
        "model.modules()",
        "tl.dot(a, b)",
        "getattr(shape, 'head_dim', None)",
        "step = torch.compile(step)",
        "import re\nre.compile('x')",
        "import traceback\ntraceback.print_exc()",
        "import timeit\ntimeit.default_timer()",
        "from IPython.display import display\nnp.testing.assert_allclose(a, b)",
    ],
)
def test_an_honest_answer_is_left_alone(source):
    assert violations(source, (SDPA,)) == []


def test_what_a_question_allows_may_be_used_in_every_spelling():
    allowed = ("labkit.models", "subprocess")
    for source in (
        "labkit.models.ModelShape",
        "from labkit.models import ModelShape",
        "import labkit.models as m\nm.ModelShape",
        "import subprocess\nsubprocess.run",
    ):
        assert violations(source, (), allowed) == []
    assert violations("labkit.block_pool", (), allowed)
    assert violations("import labkit.models_of_others", (), allowed), "a name that only begins alike is not allowed"


def test_a_method_of_the_same_name_as_a_refused_function_is_refused_but_another_library_is_not():
    refused = ("torch.cumsum",)
    assert violations("def f(x):\n    return x.cumsum(0)", refused) == ["`x.cumsum` may not be used in this answer"]
    assert violations("np.cumsum(x)", refused) == []
    assert violations("import jax.numpy as jnp\njnp.cumsum(x)", refused) == []


@pytest.mark.parametrize(
    "source",
    ["%run kernels/x.py\nx = 1", "import kernels\nprint?", "x = !python -c 1", "%%time\nimport kernels", "def f(:"],
)
def test_a_cell_that_only_ipython_can_read_is_refused(source):
    (said,) = violations(source, ())
    assert "cannot be read as plain Python" in said


def test_each_use_is_said_once_and_by_its_full_name():
    said = violations("import kernels.kv_cache as c\nc.write\nc.write\nc.write", ())
    assert said == [f"`kernels.kv_cache{end}` may not be used in this answer" for end in ("", ".write")]


def test_the_context_tells_what_a_name_stands_for_but_is_not_judged_itself():
    assert violations(
        "nnf.scaled_dot_product_attention(q)", (SDPA,), context="import torch.nn.functional as nnf\nkernels"
    )
    assert violations("k.paged_attention()", (), context="import kernels as k")
    assert violations("x = 1", (), context="import kernels as k\nimport labkit") == []


def test_what_the_setup_cell_imports_by_name_is_offered_unless_it_is_the_answer():
    context = "import labkit\nfrom labkit.models import ModelShape\nfrom kernels import kv_cache"
    assert violations("def f(shape: ModelShape): ...", (), context=context) == []
    assert violations("labkit.block_pool", (), context=context)
    assert violations("kv_cache.write", ("kernels.kv_cache",), context=context)


@pytest.mark.parametrize("source", ["models.os.popen('x')", "plots.importlib.import_module('x')", "torch.sys.modules"])
def test_a_module_that_another_module_imports_is_not_reached_through_it(source):
    assert violations(source, (), context="from labkit import models, plots\nimport torch")


# the answer as an object


def defined_in_a_cell(source: str, name: str):
    filename = f"<cell {hash(source)}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)
    namespace: dict = {"__name__": "__main__"}
    exec(compile(source, filename, "exec"), namespace)
    return namespace[name]


@pytest.mark.parametrize(
    "source",
    [
        "import math\ndef answer(x): return math.exp(x)",
        "import math\nclass answer:\n    def f(self): ...",
        "import math\nclass answer:\n    @staticmethod\n    def f(): ...",
        "import math\nclass answer:\n    @property\n    def f(self): ...",
        "import math, dataclasses\n@dataclasses.dataclass\nclass answer:\n    x: int\n    def f(self): ...",
        "import math\nfrom functools import partial\ndef f(x, y): ...\nanswer = partial(f, 1)",
        "import math, triton\n@triton.jit\ndef answer(x): pass",
    ],
)
def test_the_whole_cell_of_an_answer_is_its_source(source):
    assert source_of(defined_in_a_cell(source, "answer")) == source


def test_a_built_in_has_no_source():
    assert source_of(len) == "" and source_of(3) == ""


def test_the_shipped_code_is_recognized_under_every_wrapper():
    def shipped(x): ...

    shipped.__module__ = "kernels.paged_attention"
    kernel = type("Kernel", (), {})()
    kernel.fn = shipped
    base = type("Base", (), {"__module__": "labkit.block_pool"})
    for answer in (
        shipped,
        functools.partial(shipped, 1),
        kernel,
        base,
        type("Mine", (base,), {"__module__": "__main__"}),
    ):
        assert "is the camp's own code, not an answer" in shipped_object(answer)
    assert shipped_object(lambda x: x) == ""


# a whole notebook


@pytest.fixture
def rules(monkeypatch):
    monkeypatch.setattr(
        registry,
        "_found",
        {
            "first": Question("first", "lab", "it works"),
            "second": Question("second", "lab", "it works", refused=(SDPA,)),
            "pool": Question("pool", "lab", "it works", allowed=("labkit.models",)),
        },
    )


def book(
    first: str = "def first(): return 1", second: str = "def second(): return first()", **extra: str
) -> list[Cell]:
    """A lab of two questions; `before`, `between` and `after` are cells of the student's own."""
    own = {name: [Cell(name, source)] for name, source in extra.items()}
    return [
        Cell("setup", "import labkit, torch\nimport torch.nn.functional as nnf", is_locked=True),
        *own.get("before", []),
        Cell("first", first, is_solution=True),
        Cell("first_check", "labkit.score(labkit.check('first', first))", 1.0, is_locked=True),
        *own.get("between", []),
        Cell("second", second, is_solution=True),
        *own.get("after", []),
        Cell("second_check", "labkit.score(labkit.check('second', second))", 1.0, is_locked=True),
    ]


def test_a_clean_notebook_is_not_refused(rules):
    assert refusal(book(), "second") == ""


def test_an_import_in_another_cell_of_the_student_is_found(rules):
    use = "def second(): return pa.paged_attention()"
    assert "kernels.paged_attention" in refusal(book(second=use, before="import kernels as pa"), "second")
    bound = "def second(): return attend()"
    assert "kernels" in refusal(
        book(second=bound, before="import kernels as pa\nattend = pa.paged_attention"), "second"
    )


def test_an_alias_of_the_setup_cell_is_known(rules):
    assert "scaled_dot" in refusal(book(second="def second(q): return nnf.scaled_dot_product_attention(q)"), "second")


def test_a_later_cell_that_defines_the_answer_anew_is_looked_at(rules):
    assert "kernels" in refusal(book(after="import kernels\nsecond = kernels.paged_attention"), "second")


def test_an_earlier_answer_may_not_do_what_this_question_forbids(rules):
    first = "def first(q): return nnf.scaled_dot_product_attention(q)"
    assert "scaled_dot" in refusal(book(first=first), "second")
    assert refusal(book(first=first), "first") == "", "the first question does not forbid it"


def test_a_scratch_cell_of_the_student_costs_no_point(rules):
    scratch = "import torch, os\nimport labkit.models, labkit\nx = labkit.models\nos.getcwd()\n!nvidia-smi\nx?"
    assert refusal(book(before=scratch), "second") == ""


@pytest.mark.parametrize(
    "source",
    [
        "def f(x):\n    return torch.special.softmax(x, -1)",
        "def f(x):\n    return torch._C._nn.scaled_dot_product_attention(x, x, x)",
        "def f(x):\n    return print.__self__.eval('1')",
        "def f(x):\n    match x:\n        case object(__globals__=g):\n            return g",
        "def f(x):\n    return x.gi_frame.f_builtins",
        "from vllm import LLM\nf = LLM",
        "def f(x):\n    return torch.load(x)",
        "def f(x):\n    return x @ x",
        "def f(x):\n    return x.refill.__closure__",
    ],
)
def test_a_way_around_the_list_of_names_is_refused(source):
    names = ("torch.softmax", "torch.nn.functional.scaled_dot_product_attention", "operator.matmul")
    assert violations(source, names), f"nobody noticed this:\n{source}"


def test_what_answers_need_is_not_refused():
    source = (
        "class A:\n    def __init__(self, n):\n        self._n = n\n    def __len__(self):\n        return self._n\n"
        "def f(x):\n    y = torch.empty_like(x)\n    return torch.exp2(x).sum() + len(A(3)) + x._n"
    )
    assert violations(source, ("torch.softmax", "operator.matmul")) == []
