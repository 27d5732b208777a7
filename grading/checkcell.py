"""A visible check and its score: the release's text runs with our own `labkit` and, of the notebook, the answer alone.

Its value comes back behind a nonce, so that neither another `labkit` in the notebook nor another way of displaying
numbers earns a point.
"""

from __future__ import annotations

import builtins
import copy
import secrets

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_output

from grading.enclosed import enclosed
from grading.session import CELL_BYTES, CUT, REPLY_BYTES, Session, failure
from labkit.cells import names

RUN = """
import sys
from labkit.cells import run_cell
seen = {n: notebook[n] for n in USED if n in notebook}
value = run_cell(SOURCE, seen | {"__name__": "__main__", "labkit": sys.modules["labkit"]}, CELL)
print("\\n" + NONCE + repr(float(value) if type(value) in (int, float) else type(value).__name__))
"""


def run_check(session: Session, cell: NotebookNode, seconds: float) -> None:
    """Run the graded cell's source; its outputs are what it printed, and its value or error."""
    nonce = secrets.token_hex(16)
    used = names(cell.source)[1] - {"labkit"} - set(vars(builtins))
    given = {"USED": sorted(used), "SOURCE": cell.source, "CELL": cell.metadata.nbgrader.grade_id, "NONCE": nonce}
    work = new_code_cell(enclosed("".join(f"{key} = {value!r}\n" for key, value in given.items()) + RUN))
    try:
        session.run(work, seconds, REPLY_BYTES, history=False)
    finally:
        cell.outputs = [out for output in work.outputs for out in _shown(output, nonce)]


def _shown(output: NotebookNode, nonce: str) -> list[NotebookNode]:
    if output.output_type == "error":  # its traceback would show the lines above
        return [failure(output.ename, output.evalue)]
    if output.output_type != "stream":
        return [] if output.output_type == "execute_result" else [copy.deepcopy(output)]
    text, found, value = output.text.rpartition("\n" + nonce)
    text = text if found else output.text
    shown = [new_output("stream", name=output.name, text=text[:CELL_BYTES] + (CUT if len(text) > CELL_BYTES else ""))]
    shown = shown if text else []
    if found:
        shown.append(new_output("execute_result", data={"text/plain": value.split("\n")[0]}, execution_count=1))
    return shown


def earned(cell: NotebookNode) -> float:
    """What a graded cell earned: the number of its first result, 0 after an error."""
    for output in cell.outputs:
        if output.output_type == "error":
            return 0.0
        if output.output_type == "execute_result":
            return float(output.data["text/plain"])
    return 0.0


def make_plain(cell: NotebookNode, points: float) -> None:
    """nbgrader gives full marks for no result, None, NaN, a list or a negative number; here they are no score."""
    results = [o for o in cell.outputs if o.output_type == "execute_result"]
    if any(o.output_type == "error" for o in cell.outputs):
        cell.outputs = [o for o in cell.outputs if o.output_type != "execute_result"]
        return
    try:
        good = len(results) == 1 and 0 <= float(results[0].data["text/plain"]) <= points
    except (KeyError, ValueError):
        good = False
    if not good:
        shown = ", ".join(r.data.get("text/plain", "")[:100] for r in results[:3]) or "nothing"
        cell.outputs = [o for o in cell.outputs if o.output_type != "execute_result"]
        cell.outputs.append(
            failure("NoScore", f"the cell should end in a score of 0 to {points}, and ended in {shown}")
        )
