"""Sets parts of a student's kernel aside and puts them back: hooks around each check, names for the hidden checks.

Hidden checks run after the last cell of the notebook, so that no cell can show what they sent; each then sees the names
as they were where its cell stands.
"""

from __future__ import annotations

from grading.enclosed import enclosed
from grading.session import Session

SECONDS = 30.0

HOOKS = """
import sys
from IPython.core.getipython import get_ipython
from IPython.core.inputtransformer2 import TransformerManager
shell = get_ipython()
events = shell.events.callbacks
traits = {"ast_transformers": [], "input_transformers_post": [], "input_transformer_manager": TransformerManager()}
"""

ASIDE = """
kept = {n: getattr(shell, n) for n in traits}, {event: list(hooks) for event, hooks in events.items()}
sys.__dict__.setdefault("_camp_hooks", []).append(kept)
for name, value in traits.items():
    setattr(shell, name, value)
for hooks in events.values():
    hooks.clear()
"""

BACK = """
kept, hooks = sys.__dict__["_camp_hooks"].pop()
for name, value in kept.items():
    setattr(shell, name, value)
for event, callbacks in hooks.items():
    events[event][:] = callbacks
"""

KEEP = """
import sys
sys.__dict__.setdefault("_camp_names", {})[CELL] = dict(notebook)
"""

RESTORE = """
import sys
kept = sys.__dict__.get("_camp_names", {}).get(CELL)
if kept is not None:
    notebook.clear()
    notebook.update(kept)
"""


def hooks_aside(session: Session) -> None:
    """Switch off what was hooked into IPython: callbacks around cells, transformers of input and of syntax trees."""
    session.execute(enclosed(HOOKS + ASIDE), SECONDS)


def hooks_back(session: Session) -> None:
    """Undo hooks_aside, for the student's own cells: pyplot shows its figures through such a hook."""
    session.execute(enclosed(HOOKS + BACK), SECONDS)


def keep_names(session: Session, cell: str) -> None:
    """Remember the notebook's names as they are where `cell` stands. What they refer to is not copied."""
    session.execute(enclosed(f"CELL = {cell!r}\n{KEEP}"), SECONDS)


def restore_names(session: Session, cell: str) -> None:
    """Give the notebook the names that keep_names remembered; a later cell's helper of the same name is gone."""
    session.execute(enclosed(f"CELL = {cell!r}\n{RESTORE}"), SECONDS)
