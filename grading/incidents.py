"""What a run over a notebook reports besides the grades."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field


@dataclass(frozen=True)
class Incident:
    """Something that the instructor should know of. kind: crashed, hung, tampered, refused, unreadable,
    out_of_time, suspicious."""

    kind: str
    where: str
    message: str


@dataclass
class Report:
    """What happened besides the grades."""

    incidents: list[Incident] = field(default_factory=list)
    repairs: list[str] = field(default_factory=list)
    tier: str = ""
    sandbox: str = ""
    slowest_cell_s: float = 0.0
    kernels: int = 0

    def to_dict(self) -> dict:
        return asdict(self)
