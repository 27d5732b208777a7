"""What this machine can do, what does not fit on it, and the cure.

`read_machine()` takes the readings, `diagnose(machine)` compares them with what fits what, `run()` prints both.
Importing this package imports neither torch nor Triton: a broken one is for the doctor to explain.
"""

from __future__ import annotations

import json

from labkit.doctor import rules_gpu, rules_host, rules_packages  # noqa: F401  (each adds its rules)
from labkit.doctor.findings import Finding, diagnose
from labkit.doctor.machine import Gpu, Machine
from labkit.doctor.readings import read_machine
from labkit.doctor.tiers import lab_tiers, tier_refusals

__all__ = ["Finding", "Gpu", "Machine", "diagnose", "lab_tiers", "read_machine", "run", "tier_refusals"]


def run(as_json: bool = False) -> int:
    """Print what this machine can do. Gives the exit code: 0 if nothing blocks, else 1.

    With `as_json`, what is printed is `{ok, machine, findings: [{id, level, reason, cure, source, stops}],
    tiers: {tier: reason why not, or ""}, labs: {lab: [tiers]}}`.
    """
    from labkit.doctor import report

    machine = read_machine()
    findings = diagnose(machine)
    print(json.dumps(report.as_json(machine, findings), indent=2) if as_json else report.as_text(machine, findings))
    return int(any(finding.level == "blocking" for finding in findings))
