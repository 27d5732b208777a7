"""Does the student's kernel still tell the truth? Asked after each cell that a student may have written.

A probe must fail as an assertion, and must bring the same digest of labkit's checks as before the first cell: so
asserts were not stripped and nobody put a kinder `labkit.score` in place. A cheat can learn to pass it; the points that
no cheat reaches are those of the black-box checks. This is what makes the cheap cheats cost something.
"""

from __future__ import annotations

import re
import secrets

from grading.enclosed import enclosed
from grading.session import Session

SECONDS = 60.0

PROBE = """
def state(lab):
    import sys
    import labkit.checks
    seen = []
    def note(name, value):
        value = getattr(value, "fget", None) or getattr(value, "__func__", value)
        if hasattr(value, "__code__"):
            code = value.__code__
            seen.append((name, id(value), code.co_code, repr(code.co_consts), repr(value.__defaults__)))
        elif callable(value):
            seen.append((name, id(value)))
    parts = ("contract", "forbidden", "registry", "capture")
    for module in ("labkit", "labkit.checks", *("labkit.checks." + part for part in parts)):
        for name, value in sorted(vars(sys.modules[module]).items()):
            note(module + "." + name, value)
            if isinstance(value, type):
                for attribute, inner in sorted(vars(value).items()):
                    note(module + "." + name + "." + attribute, inner)
    for question in labkit.checks.questions_of(lab):
        seen.append((question.id, [(i.name, i.share, id(i.run)) for i in question.invariants]))
    return repr(seen)
import hashlib
assert 0 == 1, NONCE + hashlib.sha256(state(LAB).encode()).hexdigest()
"""


class Canary:
    """Remembers what a fresh kernel said. One per kernel."""

    def __init__(self, session: Session, lab: str):
        self._session, self._lab = session, lab
        self._fresh = self._ask()
        if not self._fresh:
            raise RuntimeError("the canary does not work in a fresh kernel")

    def _ask(self) -> str:
        nonce = secrets.token_hex(8)
        source = f"NONCE, LAB = {nonce!r}, {self._lab!r}\n{PROBE}"
        _, error = self._session.execute(enclosed(source), SECONDS)
        found = re.fullmatch(rf"AssertionError: {nonce}([0-9a-f]{{64}})", error)
        return found[1] if found else ""

    def trouble(self) -> str:
        """Why the kernel is no longer to be believed, or ""."""
        said = self._ask()
        if not said:
            return "assertions no longer fail in this kernel"
        return "" if said == self._fresh else "labkit's checks were replaced in this kernel"


def tier(session: Session) -> str:
    """The tier that labkit proves answers on in this kernel; asked before the student's first cell."""
    text, error = session.execute(enclosed("import labkit.device; print(labkit.device.tier())"), SECONDS)
    return text.strip() if not error else "unknown"
