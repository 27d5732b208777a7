"""From readings to findings. What fits what is in fits.toml, what to say about a misfit in misfits.toml.

A rule is a function named after its misfit that gives the values for the misfit's text, or None when all is well. The
rules are in rules_host.py, rules_packages.py and rules_gpu.py.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from labkit.doctor.machine import Machine, release

HERE = Path(__file__).parent

Values = dict[str, Any] | None
RULES: dict[str, Callable[[Machine], Values]] = {}


@dataclass(frozen=True)
class Finding:
    """One misfit of a machine. `stops` holds the tiers that cannot be used because of it."""

    id: str
    level: str  # "blocking", "warning" or "note"
    reason: str
    cure: str
    source: str
    stops: tuple[str, ...] = ()


@cache
def fits() -> dict[str, Any]:
    """The tables of fits.toml."""
    return tomllib.loads((HERE / "fits.toml").read_text(encoding="utf-8"))


@cache
def misfits() -> dict[str, dict[str, Any]]:
    """The tables of misfits.toml, by misfit."""
    return tomllib.loads((HERE / "misfits.toml").read_text(encoding="utf-8"))


def diagnose(machine: Machine) -> list[Finding]:
    """Everything that does not fit on `machine`: what blocks first, otherwise in the order of the rules."""
    findings = []
    for name, rule in RULES.items():
        values = rule(machine)
        if values is not None:
            text = misfits()[name]
            reason, cure = text["reason"].format(**values), text["cure"].format(**values)
            findings.append(Finding(name, text["level"], reason, cure, text["source"], tuple(text["stops"])))
    return sorted(findings, key=lambda finding: ("blocking", "warning", "note").index(finding.level))


def rule(function: Callable[[Machine], Values]) -> Callable[[Machine], Values]:
    """Decorator that makes `function` the rule of the misfit with its name."""
    RULES[function.__name__.replace("_", "-")] = function
    return function


def driver_cuda(machine: Machine) -> str:
    """The CUDA version that the driver supports in full: as it says itself, else by its branch."""
    known = [cuda for cuda, oldest in fits()["driver_of_cuda"].items() if release(machine.driver) >= release(oldest)]
    return machine.driver_cuda or (known[-1] if known and machine.driver else "")


def driver_needed(cuda: str) -> str:
    """The oldest driver that supports CUDA `cuda` ("12.8") in full, or at least its major version."""
    tables = fits()
    short = ".".join(cuda.split(".")[:2])
    return tables["driver_of_cuda"].get(short) or tables["driver_of_cuda_major"].get(cuda.split(".")[0], "?")


def needed(name: str) -> Any:
    """What the camp needs, from the table [needs]."""
    return fits()["needs"][name]


def outside(version: str, bounds: list[str]) -> bool:
    """Whether `version` is not in [bounds[0], bounds[1])."""
    return not release(bounds[0]) <= release(version) < release(bounds[1])


def span(name: str) -> str:
    """The range that the camp is tested on, in words."""
    low, high = needed(name)
    return f"from {low}, below {high}"


def is_cpu_build(machine: Machine) -> bool:
    """Whether the torch here was built without CUDA."""
    return "torch" in machine.packages and not machine.torch_cuda and "torch" not in machine.import_errors
