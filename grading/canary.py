"""Does the student's kernel still tell the truth? Asked after each cell that a student may have written.

A probe must fail as an assertion, and must bring the same digest of labkit's functions as before the first cell: so
asserts were not stripped, and nobody put a kinder `labkit.score` or `meter.measure` in place. A cheat can learn to pass
it; the points that no cheat reaches are those of the black-box checks. This is what makes the cheap cheats cost
something.
"""

from __future__ import annotations

import secrets

from grading.enclosed import enclosed
from grading.session import Session

SECONDS = 60.0

PROBE = """
import hashlib, importlib, sys, types
import labkit.checks, labkit.meter

def note(name, value):
    value = getattr(value, "fget", None) or getattr(value, "__func__", value)
    if hasattr(value, "__code__"):
        code = value.__code__
        seen.append((name, id(value), code.co_code, repr(code.co_consts), code.co_names, repr(value.__defaults__)))
    elif callable(value) or isinstance(value, types.ModuleType):
        seen.append((name, id(value)))
    elif isinstance(value, (int, float, str, tuple)) and not name.rpartition(".")[2].startswith("_"):
        seen.append((name, repr(value)))

questions = labkit.checks.questions_of(LAB) if LAB else []
seen = [(q.id, [(i.name, i.share, id(i.run)) for i in q.invariants]) for q in questions]
modules = MODULES or sorted(m for m in sys.modules if m.split(".")[0] == "labkit")
for module in modules:
    note(module, importlib.import_module(module))
    for name, value in sorted(vars(sys.modules[module]).items()):
        if sys.modules.get(f"{module}.{name}") is value:
            continue  # a module of ours that was imported since is no change
        note(f"{module}.{name}", value)
        if isinstance(value, type) and value.__module__ == module:
            for attribute, inner in sorted(vars(value).items()):
                note(f"{module}.{name}.{attribute}", inner)
print("\\n" + NONCE, hashlib.sha256(repr(seen).encode()).hexdigest(), *modules)
"""


class Canary:
    """Remembers what a fresh kernel said. One per kernel.

    lab: whose questions are looked at too, or "". modules: of labkit, to look at; else those that the questions import.
    """

    def __init__(self, session: Session, lab: str, modules: list[str] | None = None):
        self._session, self._lab = session, lab
        self.modules = modules or []
        self._fresh = self._ask()
        if not self._fresh:
            raise RuntimeError("the canary does not work in a fresh kernel")

    def _ask(self) -> str:
        nonce = secrets.token_hex(8)
        source = f"NONCE, LAB, MODULES = {nonce!r}, {self._lab!r}, {self.modules!r}\n{PROBE}"
        text, error = self._session.execute(f"{enclosed(source)}\nassert 0 == 1, {nonce!r}", SECONDS)
        said = text.rpartition("\n" + nonce)[2].split()
        if error != f"AssertionError: {nonce}" or len(said) < 2:
            return ""
        self.modules = said[1:]
        return said[0]

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
