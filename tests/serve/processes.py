"""What a server has on this machine, and whether it is gone: of its own processes only, since others may run too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path


def runs(pid: int) -> bool:
    """Whether a process runs: one that has ended and was not fetched yet by whoever inherited it does not."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def folder_of(pid: int) -> Path | None:
    """The temporary folder that a process was given by a guard."""
    for variable in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
        name, _, value = variable.partition(b"=")
        folder = Path(value.decode())
        if name == b"TMPDIR" and folder.name.startswith("labkit-serve-"):
            return folder
    return None


def files(pids: Iterable[int]) -> set[str]:
    """Temporary folders of these processes, and shared memory that they have mapped and that has a name still."""
    found: set[str] = set()
    for pid in pids:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            folder = folder_of(pid)
            found |= {str(folder)} if folder else set()
            mapped = [line.split(None, 5)[-1] for line in Path(f"/proc/{pid}/maps").read_text().splitlines()]
            found |= {path for path in mapped if path.startswith("/dev/shm/") and not path.endswith("(deleted)")}
    return found


def left_over(pids: Iterable[int], paths: Iterable[str | Path], within: float = 5.0) -> set[str]:
    """What of these is still there after `within` seconds at most."""
    pids, paths = list(pids), list(paths)
    deadline = time.monotonic() + within
    while True:
        left = {f"process {pid}" for pid in pids if runs(pid)} | {str(path) for path in paths if Path(path).exists()}
        if not left or time.monotonic() > deadline:
            return left
        time.sleep(0.05)
