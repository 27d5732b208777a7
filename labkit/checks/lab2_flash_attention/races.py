"""Reading a race, and handing out work."""

from __future__ import annotations

import math

from labkit.checks.contract import Question, require

LAB = "lab2_flash_attention"

read_race = Question(
    "read_race", LAB, "a race is read by its geometric mean and its worst case, whichever way the unit counts"
)

ROWS = [
    {"case": "long", "better": "higher", "ours": 600.0, "peers": {"fa3": 500.0, "fa2": 300.0}},
    {"case": "short", "better": "higher", "ours": 100.0, "peers": {"fa3": 200.0, "fa2": 90.0}},
    {"case": "decode", "better": "lower", "ours": 5.0, "peers": {"fa3": 4.0}},
    {"case": "odd", "better": "lower", "ours": 2.0, "peers": {"fa2": 8.0}},
]


def _reads(answer, peer: str, want: tuple[float, str, float]) -> None:
    got = answer([dict(row) for row in ROWS], peer)
    require(isinstance(got, tuple) and len(got) == 3, f"three values were expected, not {got!r}")
    worst = got[1] == want[1] and math.isclose(got[2], want[2])
    require(worst, f"against {peer}: worst case {got[1:]}, {want[1:]} expected; microseconds count the other way")
    require(
        math.isclose(got[0], want[0]), f"against {peer}: mean {got[0]}, {want[0]} expected: is it the geometric one?"
    )


@read_race.invariant("both directions of better")
def _(answer) -> None:
    _reads(answer, "fa3", ((1.2 * 0.5 * 0.8) ** (1 / 3), "short", 0.5))


@read_race.invariant("rows without the peer do not count")
def _(answer) -> None:
    _reads(answer, "fa2", ((2 * 10 / 9 * 4) ** (1 / 3), "short", 10 / 9))


@read_race.invariant("a peer that nobody raced is an error")
def _(answer) -> None:
    try:
        got = answer([dict(row) for row in ROWS], "cudnn")
    except ValueError as error:
        require("cudnn" in str(error), f"the ValueError does not name the peer: {error}")
        return
    require(False, f"no row has cudnn, and the answer was {got}, not a ValueError")


balanced_tiles = Question(
    "balanced_tiles", LAB, "each tile is handed out once, and no worker has much more than the others"
)


def _balanced(answer, tiles: int, workers: int) -> float:
    lists = answer(tiles, workers)
    require(len(lists) == workers, f"{len(lists)} lists for {workers} workers")
    flat = sorted(tile for work in lists for tile in work)
    require(flat == list(range(tiles)), f"{tiles} tiles over {workers} workers: some tile is missing or stands twice")
    costs = [sum(tile + 1 for tile in work) for work in lists]
    most = max(1.05 * sum(costs) / workers, tiles)
    require(
        max(costs) <= most,
        f"{tiles} tiles over {workers} workers: the largest total is {max(costs)}, at most {most:.0f} was asked for",
    )
    return max(costs) / most


@balanced_tiles.invariant("many tiles a worker")
def _(answer) -> float:
    return max(_balanced(answer, n, w) for n, w in ((64, 8), (128, 132 // 8), (37, 8), (40, 10), (528, 132)))


@balanced_tiles.invariant("fewer tiles than workers, and none")
def _(answer) -> None:
    for n, w in ((3, 8), (0, 4), (1, 1)):
        if n:
            _balanced(answer, n, w)
        else:
            require(answer(0, w) == [[] for _ in range(w)], f"no tiles over {w} workers: {w} empty lists expected")


QUESTIONS = [read_race, balanced_tiles]
