"""What students do to cheat: one edit of a perfect notebook each, and what must come of it."""

from __future__ import annotations

from scenarios import SCENARIOS, none_of, scenario
from toy import answer, at, insert

__all__ = ["HISTORY", "SCENARIOS", "SPY"]  # those of scenarios.py and these

WRONG = "def ceil_div(n, size):\n    return 7"


@scenario(note="its points were changed")
def points_edited_to_a_thousand(nb):
    nb.cells[at(nb, "softmax_hidden")].metadata.nbgrader.points = 1000


@scenario(lost=none_of("ceil_div"))
def emptied_checks_and_a_wrong_answer(nb):
    answer(nb, "ceil_div", WRONG)
    for name in ("ceil_div_check", "ceil_div_hidden"):
        nb.cells[at(nb, name)].source = "5.0"


@scenario(lost=none_of("ceil_div"), slow=True)
def a_tag_that_skips_the_check(nb):
    answer(nb, "ceil_div", WRONG)
    for name in ("ceil_div_check", "ceil_div_hidden"):
        nb.cells[at(nb, name)].metadata["tags"] = ["skip-execution"]


@scenario(lost=none_of("ceil_div"), note="tampered in cell", status="tampered")
def asserts_stripped_from_every_cell(nb):
    answer(nb, "ceil_div", WRONG)
    insert(
        nb,
        """
        import ast
        class Strip(ast.NodeTransformer):
            def visit_Assert(self, node):
                return ast.Pass()
        get_ipython().ast_transformers.append(Strip())
    """,
    )


@scenario(lost=none_of("ceil_div"), note="tampered in cell", status="tampered")
def a_kinder_score_function(nb):
    answer(nb, "ceil_div", WRONG)
    insert(nb, "labkit.score = lambda result, points=1.0: float(points)")


@scenario(lost=none_of("ceil_div"), note="tampered in cell", status="tampered", slow=True)
def invariants_taken_out_of_a_question(nb):
    answer(nb, "ceil_div", WRONG)
    insert(
        nb,
        """
        import labkit.checks
        question = labkit.checks.find_question("ceil_div")
        question.invariants[:] = [type(question.invariants[0])("fine", lambda answer: None, 1.0)]
    """,
    )


@scenario(lost=none_of("total"), note="in total", status="tampered")
def an_answer_that_patches_the_checks_when_called(nb):
    answer(
        nb,
        "total",
        "def total(x):\n    import labkit.checks.contract as c\n    c.Result.fraction = 1.0\n    return 0.0",
    )


@scenario(lost={"softmax_hidden": 0.0}, note="suspicious in softmax", status="tampered")
def a_patched_numpy_passes_the_visible_check_only(nb):
    answer(nb, "softmax", "def softmax(x):\n    return np.ones((2, 4))")
    insert(nb, "np.allclose = lambda *a, **k: True")


@scenario(lost={"ceil_div_hidden": 0.0}, note="suspicious in ceil_div", status="tampered")
def a_number_that_equals_everything(nb):
    answer(
        nb,
        "ceil_div",
        """
        class Any(int):
            def __eq__(self, other): return True
            __hash__ = int.__hash__
        def ceil_div(n, size): return Any(-5)
    """,
    )


@scenario(lost=none_of("ceil_div"))
def another_labkit_and_another_way_to_show_numbers(nb):
    answer(nb, "ceil_div", WRONG)
    insert(
        nb,
        """
        from types import SimpleNamespace
        labkit = SimpleNamespace(check=lambda q, a: q, score=lambda r, points=1: float(points))
        get_ipython().display_formatter.formatters["text/plain"].for_type(float, lambda x, p, cycle: p.text("2.0"))
        """,
    )


@scenario(lost=none_of("ceil_div"), note="tampered in ceil_div_check", status="tampered")
def a_hook_that_patches_the_checks_while_they_run(nb):
    answer(nb, "ceil_div", WRONG)
    insert(
        nb,
        """
        import labkit.checks.contract as c
        true = c.Result.fraction
        def before(info):
            if "labkit.score(labkit" in info.raw_cell or "hooks.clear()" in info.raw_cell: c.Result.fraction = 1.0
        def after(result): c.Result.fraction = true
        get_ipython().events.register("pre_run_cell", before)
        get_ipython().events.register("post_run_cell", after)
        """,
    )


@scenario(lost=none_of("ceil_div"))
def a_transformer_that_writes_another_check(nb):
    answer(nb, "ceil_div", WRONG)
    insert(
        nb,
        """
        def other(lines): return ["2.0"] if any("labkit.score" in line for line in lines) else lines
        get_ipython().input_transformers_post.append(other)
        """,
    )


@scenario(note="tampered in cell", status="tampered")
def a_kinder_meter_and_a_kinder_comparison(nb):
    insert(nb, "import labkit.meter\nlabkit.meter.measure_many = lambda calls, **k: []")
    insert(nb, "import labkit.checks.compare\nlabkit.checks.compare.close = lambda *a, **k: 0.0", after="total")
    insert(nb, "import labkit.meter.calls as m\nm.measure = None", after="softmax")


@scenario(note="crashed in cell3: the kernel died, since it filled the folder", status="graded")
def a_disk_filled_through_the_folder_of_the_sockets(nb):
    insert(
        nb,
        """
        import glob, time
        place = glob.glob("/tmp/camp-*")[0]
        for i in range(1, 99):
            with open(f"{place}/fill{i}", "wb") as f: f.write(bytes(50_000_000))
            time.sleep(0.1)
        """,
        after="ceil_div",
    )


@scenario(lost=none_of("softmax"))
def a_small_reply_of_800_mb(nb):
    insert(nb, "np.savez = np.savez_compressed")
    answer(nb, "softmax", "def softmax(x):\n    return np.zeros(10**8)")


HISTORY = "LEAK: "


@scenario()
def the_hidden_checks_looked_for_in_the_history(nb):
    insert(
        nb,
        f"""
        import linecache
        texts = [*In, *map(str, Out.values()), *(''.join(v[2]) for v in linecache.cache.values() if len(v) > 2)]
        texts += [str(v) for v in globals().values() if isinstance(v, str)]
        print({HISTORY!r}, [t for t in texts if "6250" + "1" in t or "PAY" + "LOAD" in t])
        """,
        after="softmax_hidden",
    )


@scenario()
def a_later_cell_that_uses_a_helpers_name_again(nb):
    """Hidden checks run last, and see the names as they were at their cell."""
    answer(nb, "ceil_div", "def part(n, size): return n // size\ndef ceil_div(n, size): return -part(-n, size)")
    insert(nb, "part = 'of a whole'\nceil_div = 7", after="softmax")


@scenario(lost=none_of("softmax"), note="refused in softmax: `kernels.toy_answer", status="tampered")
def the_shipped_answer(nb):
    answer(nb, "softmax", "from kernels.toy_answer import softmax")


@scenario(lost=none_of("total"), note="refused in total: `math.fsum", status="tampered")
def a_refused_function_behind_a_helper(nb):
    insert(nb, "import math\nadd_up = math.fsum")
    answer(nb, "total", "def total(x):\n    return add_up(x.ravel())")


@scenario(lost=none_of("ceil_div"))
def the_shipped_answer_by_a_name_made_at_run_time(nb):
    insert(
        nb,
        """
        import builtins, importlib
        try:
            builtins.borrowed = importlib.import_module("ker" + "nels.toy_" + "answer").ceil_div
        except ImportError as error:
            print("NOTHING THERE:", error)
    """,
    )
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    return borrowed(n, size)")


@scenario(lost={"ceil_div_hidden": 0.0}, note="suspicious in ceil_div", status="tampered")
def what_the_visible_check_compares_with(nb):
    """The kernel of the hidden checks has no visible ones in it, nor what a scratch cell has put into a module."""
    insert(nb, "import math as m\nimport labkit.checks.lab90_toy as checks\nm.borrowed = checks.rounded_up")
    answer(nb, "ceil_div", "def ceil_div(n, size):\n    import math\n    return math.borrowed(n, size)")


@scenario(
    files={"numpy.py": "raise SystemExit", "labkit/__init__.py": "score = None"},
    note="left out: labkit/__init__.py, numpy.py",
)
def modules_that_shadow_ours(nb):
    pass


@scenario(files={"data.txt": "my own numbers"})
def a_changed_data_file(nb):
    insert(nb, "print('DATA:', open('data.txt').read())")


SPY = """
import glob, os, socket, sys
course = {root!r}
places = [course, course + "/grading/gradebook.db", {repository!r} + "/solutions", {repository!r} + "/grading"]
print("SEEN:", [p for p in places if os.path.exists(p)])
print("NOTEBOOKS:", glob.glob("/tmp/**/*.ipynb", recursive=True) + glob.glob("*.ipynb"))
print("USER:", os.getuid(), [line for line in open("/proc/self/status") if line.startswith("CapEff")][0].split()[1])
print("PROCESSES:", len([p for p in os.listdir("/proc") if p.isdigit()]))
try:
    socket.create_connection(("127.0.0.1", {port}), timeout=3)
    print("NETWORK: open")
except OSError as error:
    print("NETWORK: closed")
try:
    import grading
    print("GRADING: imported")
except ImportError:
    print("GRADING: closed")
print("SECRET:", os.environ.get("CAMP_TEST_SECRET"))
import subprocess
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", {marker!r}], start_new_session=True)
"""
