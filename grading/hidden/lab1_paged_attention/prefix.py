"""Hidden checks of lab 1: the prefix cache.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

from grading.blackbox import Remote, hidden_check, require

LAB = "lab1_paged_attention"


def prefix_log(block_size: int, script: list) -> list:
    """Driver: play a script on a PrefixCache. evict takes the list of blocks that have an owner."""
    cache = PrefixCache(block_size)
    log: list = []
    for action, *arguments in script:
        if action == "evict":
            got = cache.evict(lambda block, owned=arguments[0]: int(block in owned))
            log.append(None if got is None else int(got))
        elif action == "insert":
            cache.insert(*arguments)
            log.append(None)
        else:
            log.append([int(b) for b in cache.match(arguments[0])])
    return log


def _plays(remote: Remote, block_size: int, script: list, look_at: str) -> None:
    log = remote.call(prefix_log, block_size, [action for action, _ in script])
    for (action, want), got in zip(script, log, strict=True):
        require(got == want, f"{look_at}: {action[0]} gave {got}, {want} expected")


@hidden_check(LAB, "prefix_cache")
def prefixes_are_chained(remote: Remote) -> None:
    first, other = [5, 6, 7, 8, 9, 10, 11], [1, 6, 7, 8, 9, 10, 11]
    script = [
        (["insert", first, [20, 21, 22]], None),
        (["match", first], [20, 21]),
        (["match", other], []),
        (["insert", other, [30, 31, 32]], None),
        (["match", [*other, 4]], [30, 31]),
        (["match", [*first[:6], 0, 0]], [20, 21]),
        (["match", first[:6]], [20]),
    ]
    _plays(remote, 3, script, "two sequences that differ in their first token only")


@hidden_check(LAB, "prefix_cache")
def owners_are_respected(remote: Remote) -> None:
    script = [
        (["insert", [1, 1, 2, 2, 3, 3, 0], [4, 5, 6, 7]], None),
        (["evict", [4, 5, 6]], None),
        (["evict", [4]], 6),
        (["evict", [4]], 5),
        (["match", [1, 1, 2, 2, 0]], [4]),
        (["evict", []], 4),
        (["evict", []], None),
    ]
    _plays(remote, 2, script, "blocks of a running request")


@hidden_check(LAB, "prefix_cache")
def use_keeps_blocks(remote: Remote) -> None:
    script = [
        (["insert", [1, 1, 0], [0]], None),
        (["insert", [2, 2, 0], [1]], None),
        (["insert", [3, 3, 0], [2]], None),
        (["match", [1, 1, 9]], [0]),
        (["evict", []], 1),
        (["insert", [3, 3, 5], [8]], None),
        (["evict", []], 0),
        (["match", [3, 3, 9]], [2]),
    ]
    _plays(remote, 2, script, "the order of use")
