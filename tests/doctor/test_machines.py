"""Recorded and made-up machines, each with the findings and the usable tiers that it must get."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from labkit import doctor
from labkit.doctor import findings as rules
from labkit.doctor import report

MACHINES = sorted((Path(__file__).parent / "machines").glob("*.json"))


def load(path: Path) -> tuple[doctor.Machine, dict]:
    recorded = json.loads(path.read_text(encoding="utf-8"))
    return doctor.Machine.from_json(recorded["machine"]), recorded["expected"]


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_a_machine_gets_its_findings_and_its_tiers(path):
    machine, expected = load(path)
    found = doctor.diagnose(machine)
    said = "\n".join(f"{f.level} {f.id}: {f.reason}" for f in found)
    assert [f.id for f in found] == expected["findings"], f"found:\n{said}"
    refusals = doctor.tier_refusals(machine, found)
    assert [tier for tier, why in refusals.items() if not why] == expected["tiers"], f"refused: {refusals}"


@pytest.mark.parametrize("path", MACHINES, ids=lambda path: path.stem)
def test_every_finding_is_shown_with_its_cure(path):
    machine, _ = load(path)
    found = doctor.diagnose(machine)
    text = "".join(report.as_text(machine, found, color=False).split())
    for finding in found:
        assert finding.id in text
        for words in (finding.reason, finding.cure):
            assert "".join(words.split()) in text, f"{finding.id}: {words!r} is not in what is printed"


def test_every_misfit_has_a_rule_and_every_rule_a_text():
    assert set(rules.RULES) == set(rules.misfits())


def test_every_misfit_occurs_on_some_machine():
    seen = {name for path in MACHINES for name in load(path)[1]["findings"]}
    assert set(rules.misfits()) - seen == set(), "add a machine on which this misfit must be found"


def test_every_misfit_says_why_and_what_to_do():
    for name, text in rules.misfits().items():
        assert set(text) == {"level", "stops", "reason", "cure", "source"}, name
        assert text["level"] in ("blocking", "warning", "note"), name
        assert set(text["stops"]) <= {"interpreter", "cuda", "vllm"}, name
        assert text["reason"].endswith((".", "}", "')", "'.")) and text["cure"] and text["source"], name


def test_every_lab_is_in_the_table_of_tiers():
    labs = {p.name for p in (Path(__file__).parents[2] / "labs").iterdir() if (p / f"{p.name}.ipynb").exists()}
    table = {lab["slug"]: lab["tiers"] for lab in rules.fits()["lab"]}
    assert set(table) == labs, "labkit/doctor/fits.toml must name every lab, and no other"
    assert all("interpreter" in tiers for tiers in table.values()), "every point can be earned with no GPU"


def test_a_reading_that_there_is_not_is_refused_by_name():
    with pytest.raises(ValueError, match="unknown readings: gpu_count"):
        doctor.Machine.from_json({"gpu_count": 1})
