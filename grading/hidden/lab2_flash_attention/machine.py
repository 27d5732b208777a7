"""Hidden checks of lab 2: occupancy, configurations, banks, races.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import math
import random

from grading.blackbox import Remote, hidden_check, require
from labkit.compiled.arch import occupancy

LAB = "lab2_flash_attention"


def programs(cases: list[list[int]]) -> list[int]:
    """Driver: programs_per_sm of each case."""
    return [int(programs_per_sm(*case)) for case in cases]


def fits(registers: int, shared: int, warps: int) -> int:
    """The limits of sm_90, by the camp's own calculator."""
    return occupancy("sm_90", threads=32 * warps, registers=registers, shared=shared).blocks


@hidden_check(LAB, "programs_per_sm")
def random_kernels(remote: Remote) -> None:
    rng = random.Random(1)
    cases = [[rng.randint(16, 255), rng.choice([0, 9000, 49152, 100000]), rng.choice([1, 2, 4, 8])] for _ in range(40)]
    for case, got in zip(cases, remote.call(programs, cases), strict=True):
        require(got == fits(*case), f"{got} programs for registers, shared bytes, warps {case}, {fits(*case)} expected")


def choose(configs: list[dict], reports: list, min_programs: int) -> list:
    """Driver: choose_config with prepared reports; the index chosen, or the error's name, and the number of calls."""
    from types import SimpleNamespace

    asked = []

    def report(config):
        at = next(i for i, c in enumerate(configs) if c is config or c == config)
        asked.append(at)
        if reports[at] is None:
            raise RuntimeError("does not compile")
        registers, spills, shared_bytes = reports[at]
        return SimpleNamespace(registers=registers, spills=spills, shared_bytes=shared_bytes)

    try:
        chosen = choose_config(configs, report, min_programs)
        return [configs.index(chosen), len(asked)]
    except ValueError:
        return ["ValueError", len(asked)]


@hidden_check(LAB, "choose_config")
def random_choices(remote: Remote) -> None:
    rng = random.Random(2)
    for _ in range(8):
        configs, reports = [], []
        for i in range(7):
            configs.append(
                {
                    "block_m": rng.choice([16, 32, 64, 128]),
                    "block_n": 32 + i,
                    "num_warps": rng.choice([4, 8]),
                    "num_stages": 2,
                }
            )
            reports.append(
                None
                if rng.random() < 0.15
                else [rng.randint(40, 255), rng.choice([0, 0, 64]), rng.choice([8192, 65536])]
            )
        least = rng.randint(1, 3)
        best, best_key = "ValueError", (0, 0)
        for i, (config, got) in enumerate(zip(configs, reports, strict=True)):
            if got and not got[1]:
                key = (config["block_m"], fits(got[0], got[2], config["num_warps"]))
                if key[1] >= least and key > best_key:
                    best, best_key = i, key  # type: ignore[assignment]
        chosen, calls = remote.call(choose, configs, reports, least)
        require(
            chosen == best,
            f"candidate {chosen} chosen of {configs} with {reports}, at least {least} programs; {best} expected",
        )
        require(calls <= 7, f"{calls} compilations for 7 candidates")


def conflicts(accesses: list[list[int]]) -> list[int]:
    """Driver: count_conflicts of each access."""
    return [int(count_conflicts(a)) for a in accesses]


@hidden_check(LAB, "count_conflicts")
def random_accesses(remote: Remote) -> None:
    rng = random.Random(3)
    accesses = [[4 * rng.randrange(n) for _ in range(32)] for n in (8, 32, 64, 500, 4000)] + [
        [4 * 64 * i for i in range(32)]
    ]
    for access, got in zip(accesses, remote.call(conflicts, accesses), strict=True):
        want = max(len({a for a in access if a // 4 % 32 == bank}) for bank in range(32)) - 1
        require(got == want, f"{got} conflicts, {want} expected for {access[:6]}...")


def swizzled(cases: list[list[int]]) -> list[int]:
    """Driver: swizzled_address of each case."""
    return [int(swizzled_address(*case)) for case in cases]


@hidden_check(LAB, "swizzled_address")
def random_elements(remote: Remote) -> None:
    rng = random.Random(4)
    shapes = [(1, 32, 32), (4, 8, 32), (8, 8, 64), (2, 16, 32), (4, 1, 16)]
    cases = []
    for vec, phase, cols in shapes:
        cases += [[rng.randrange(64), rng.randrange(cols), vec, phase, cols] for _ in range(12)]
    for (row, col, vec, phase, cols), got in zip(cases, remote.call(swizzled, cases), strict=True):
        want = 4 * (row * cols + ((col // vec) ^ (row % phase)) * vec + col % vec)
        require(got == want, f"({row}, {col}), vec {vec}, max_phase {phase}, {cols} columns: {got}, {want} expected")


def race(rows: list[dict], peer: str) -> list:
    """Driver: read_race, or the error's name and text."""
    try:
        return list(read_race(rows, peer))
    except ValueError as error:
        return ["ValueError", str(error)]


@hidden_check(LAB, "read_race")
def random_rows(remote: Remote) -> None:
    rng = random.Random(5)
    rows: list[dict] = [
        {"case": f"case {i}", "better": rng.choice(["higher", "lower"]), "ours": rng.uniform(1, 9),
         "peers": {p: rng.uniform(1, 9) for p in rng.sample(["a", "b", "c"], 2)}}
        for i in range(12)
    ]  # fmt: skip
    for peer in "abc":
        ratios = {}
        for row in rows:
            if peer in row["peers"]:
                ratio = row["ours"] / row["peers"][peer]
                ratios[row["case"]] = ratio if row["better"] == "higher" else 1 / ratio
        mean, name, worst = remote.call(race, rows, peer)
        want = math.exp(sum(map(math.log, ratios.values())) / len(ratios))
        require(math.isclose(mean, want), f"geometric mean {mean}, {want} expected")
        require(
            name == min(ratios, key=ratios.__getitem__) and math.isclose(worst, min(ratios.values())),
            f"worst case {name}",
        )
    refused = remote.call(race, rows, "nobody")
    require(refused[0] == "ValueError" and "nobody" in str(refused[1]), f"a peer that is not there gave {refused}")


@hidden_check(LAB, "balanced_tiles")
def other_sizes(remote: Remote) -> None:
    for tiles, workers in ((100, 9), (256, 16), (5, 9), (1, 3)):
        lists = remote.call("balanced_tiles", tiles, workers)
        require(len(lists) == workers, f"{len(lists)} lists for {workers} workers")
        require(
            sorted(t for work in lists for t in work) == list(range(tiles)),
            f"{tiles} tiles are not handed out once each",
        )
        costs = [sum(t + 1 for t in work) for work in lists]
        require(
            max(costs) <= max(1.05 * sum(costs) / workers, tiles),
            f"{tiles} tiles, {workers} workers: the largest total is {max(costs)}",
        )
