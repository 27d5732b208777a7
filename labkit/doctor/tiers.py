"""Which tier can be used here, and which lab can be done at which tier."""

from __future__ import annotations

from collections.abc import Iterable

from labkit.doctor.findings import Finding, fits
from labkit.doctor.machine import Machine

TIERS = {
    "interpreter": "Triton's interpreter and offline compiler: every point can be earned",
    "cuda": "kernels on an NVIDIA GPU",
    "vllm": "a real vLLM engine or server",
}


def tier_refusals(machine: Machine, findings: Iterable[Finding]) -> dict[str, str]:
    """For each tier why it cannot be used on `machine`, "" where it can."""
    refusals = dict.fromkeys(TIERS, "")
    for finding in findings:
        for tier in finding.stops:
            refusals[tier] = refusals[tier] or finding.reason
    if not machine.gpus:
        refusals["cuda"] = refusals["cuda"] or "There is no NVIDIA GPU here."
    return refusals


def lab_tiers(refusals: dict[str, str]) -> dict[str, list[str]]:
    """For each lab the tiers at which it can be done here; none means not at all."""
    return {lab["slug"]: [tier for tier in lab["tiers"] if not refusals[tier]] for lab in fits()["lab"]}
