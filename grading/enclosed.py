"""Source of the grader's own that runs in the student's process, out of the way of the student's names.

It has a namespace of its own, in which `notebook` is the notebook's: what the grader defines never overwrites a
student's helper, and a student's `str = "a note"` is not the grader's `str`.
"""

from __future__ import annotations

CELL = """import builtins as _camp_builtins
_camp_builtins.exec(
    _camp_builtins.compile({source!r}, "<grader>", "exec", 0, True),
    {{"__name__": "<grader>", "__builtins__": _camp_builtins, "notebook": _camp_builtins.globals()}},
)"""


def enclosed(source: str) -> str:
    """The cell that runs `source` so. It need not be IPython that runs it."""
    return CELL.format(source=source)
