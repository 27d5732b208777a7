"""What was handed in, as bytes: a folder or a zip file, of which never more is read than a limit."""

from __future__ import annotations

import zipfile
from abc import ABC, abstractmethod
from pathlib import Path, PurePosixPath
from typing import BinaryIO, cast

MAX_BYTES = 32_000_000  # of all that is read of a submission: parsed JSON takes many times its size
MAX_MANIFEST = 1_000_000
MANIFEST = "manifest.json"


class Unusable(Exception):
    """A submission that cannot be graded, and why."""


class Place(ABC):
    """Files of one submission. names: relative, with /, without what operating systems and editors leave behind."""

    def __init__(self, names: list[str]) -> None:
        self.names = sorted(name for name in names if not _is_noise(name))
        self._read: dict[str, bytes] = {}

    @property
    def notebooks(self) -> list[str]:
        """Names of notebooks."""
        return [name for name in self.names if name.endswith(".ipynb")]

    def read(self, name: str, limit: int | None = None) -> bytes:
        """A file's bytes. Unusable if it has more than `limit`, or than MAX_BYTES together with those read before."""
        if name not in self._read:
            left = MAX_BYTES - sum(map(len, self._read.values()))
            allowed = left if limit is None else min(limit, left)
            with self._open(name) as file:
                data = file.read(allowed + 1)
            if len(data) > allowed:
                raise Unusable(f"{name} has over {allowed / 1e6:.3g} MB, which is more than is read of it")
            self._read[name] = data
        return self._read[name]

    def text(self, name: str) -> str:
        """A file's text. Unusable if it is none."""
        try:
            return self.read(name).decode("utf-8-sig")
        except UnicodeDecodeError:
            raise Unusable(f"{name} is not a text file") from None

    @abstractmethod
    def _open(self, name: str) -> BinaryIO:
        """A file that is there, to be read."""


class Folder(Place):
    """A folder; no link in it is followed."""

    def __init__(self, path: Path) -> None:
        self.path = path
        files = (p for p in path.rglob("*") if p.is_file() or p.is_symlink())
        super().__init__([p.relative_to(path).as_posix() for p in files])

    def _open(self, name: str) -> BinaryIO:
        if (self.path / name).is_symlink():
            raise Unusable(f"{name} is a link, not a file")
        return (self.path / name).open("rb")


class Archive(Place):
    """An open zip file, which can claim to hold far more than it weighs."""

    def __init__(self, archive: zipfile.ZipFile) -> None:
        self.archive = archive
        super().__init__([i.filename for i in archive.infolist() if not i.is_dir()])

    def _open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self.archive.open(name))


def _is_noise(name: str) -> bool:
    """Finder's `__MACOSX/` and `._name`, `.DS_Store`, `.ipynb_checkpoints/`."""
    parts = PurePosixPath(name).parts
    return parts[:1] == ("__MACOSX",) or any(part.startswith(".") for part in parts)
