"""What a run left out is said at its end, with the reason: a missing GPU is no silence."""

from __future__ import annotations

from collections import Counter


def pytest_terminal_summary(terminalreporter) -> None:
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(str(r.longrepr[2]) if isinstance(r.longrepr, tuple) else str(r.longrepr) for r in skipped)
    for reason, count in sorted(reasons.items()):
        terminalreporter.write_line(f"LEFT OUT: {count} tests, because: {reason.removeprefix('Skipped: ')}")
