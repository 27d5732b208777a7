"""Recorded GPU runs: one small JSON file per benchmark and GPU, from which every quoted figure is computed."""

from __future__ import annotations

import datetime
import importlib.metadata
import json
import math
import platform
import subprocess
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parent.parent / "evidence"
KEYS = ("benchmark", "gpu", "driver", "versions", "date", "command", "rows")
OPTIONAL = ("variant", "interval")  # keys of a row


@dataclass(frozen=True)
class Row:
    """One case. ours and peers: medians, in `unit`. spread: interquartile range of ours over its median; of a share, in
    points over 100.

    variant: which of our kernels ran, where a benchmark has several. interval: low and high end of 95 %, for what is
    estimated and not timed. Both are left out of the file where there is none.
    """

    case: str
    unit: str
    better: str
    ours: float
    peers: dict[str, float]
    spread: float
    variant: str | None = None
    interval: list[float] | None = None

    def ratio(self, peer: str) -> float:
        """How many times better than `peer` ours is; above 1 is a win, whichever way the unit counts."""
        return self.ours / self.peers[peer] if self.better == "higher" else self.peers[peer] / self.ours


@dataclass(frozen=True)
class Evidence:
    """One run of one benchmark on one GPU."""

    benchmark: str
    gpu: str
    driver: str
    versions: dict[str, str]
    date: str
    command: str
    rows: list[Row]

    @property
    def file_name(self) -> str:
        """<benchmark>.<gpu>.json, the GPU's name in lower case with dashes."""
        return f"{self.benchmark}.{self.gpu.lower().replace(' ', '-')}.json"

    def write(self, path: Path) -> None:
        """Write to `path`, one row a line, so that a new run shows as a readable difference."""
        head = {key: value for key, value in asdict(self).items() if key != "rows"}
        rows = ",\n".join("    " + json.dumps(_shown(row)) for row in self.rows)
        text = json.dumps(head, indent=2).removesuffix("\n}")
        path.write_text(f'{text},\n  "rows": [\n{rows}\n  ]\n}}\n', encoding="utf-8")


def _shown(row: Row) -> dict[str, Any]:
    return {key: value for key, value in asdict(row).items() if key not in OPTIONAL or value is not None}


def here(benchmark: str, command: str, rows: list[Row], packages: tuple[str, ...] = ()) -> Evidence:
    """Evidence of a run on this machine's current GPU."""
    versions = {"python": platform.python_version(), "torch": torch.__version__, "cuda": str(torch.version.cuda)}
    for package in ("triton", *packages):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    today = datetime.datetime.now(datetime.UTC).date().isoformat()
    return Evidence(benchmark, torch.cuda.get_device_name(), _driver(), versions, today, command, rows)


def load(path: Path) -> Evidence:
    """Read an evidence file. Raises ValueError, naming what is wrong, if it is not in the format."""
    data: Any = json.loads(path.read_text(encoding="utf-8"))
    if tuple(data) != KEYS:
        raise ValueError(f"{path.name}: expected the keys {', '.join(KEYS)}, got {', '.join(data)}")
    rows = []
    for number, row in enumerate(data["rows"]):
        expected = [key for key in Row.__dataclass_fields__ if key not in OPTIONAL or key in row]
        if list(row) != expected:
            raise ValueError(f"{path.name}: row {number} has the keys {list(row)}, expected {expected}")
        if row["better"] not in ("higher", "lower"):
            raise ValueError(f'{path.name}: row {number}: better is {row["better"]!r}, expected "higher" or "lower"')
        rows.append(Row(**row))
    return Evidence(**{**data, "rows": rows})


def ratios(rows: list[Row], peer: str) -> dict[str, float]:
    """Case -> how many times better than `peer` ours is, for the rows that have this peer."""
    return {row.case: row.ratio(peer) for row in rows if peer in row.peers}


def geometric_mean(values: list[float]) -> float:
    """exp(mean(log(values))), the mean that treats 2x and 0.5x as opposites."""
    return math.exp(math.fsum(map(math.log, values)) / len(values))


def _driver() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        return "unknown"
