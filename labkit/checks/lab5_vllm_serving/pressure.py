"""Preemptions, caused and counted."""

from __future__ import annotations

from typing import cast

from labkit.checks.contract import Question, require
from labkit.checks.lab5_vllm_serving.cases import scrape

LAB = "lab5_vllm_serving"

overcommit = Question("overcommit", LAB, "all are let in, each could finish alone, and together they cannot")
counter_increase = Question("counter_increase", LAB, "one counter's growth, over all engines", ("labkit.serve.client",),
                            ("prometheus_client",))  # fmt: skip


def _blocks(tokens: int, size: int) -> int:
    return -(-tokens // size)


def judge(got: object, blocks: int, size: int, sequences: int, length: int) -> None:
    """Raise Failed unless a load of got = (count, prompt_len, output_len) must be preempted, and then ends well."""
    server = f"{blocks} blocks of {size}, {sequences} sequences at most"
    fine = isinstance(got, tuple) and len(got) == 3 and all(type(n) is int and n > 0 for n in got)
    require(fine, f"{got!r} is not (count, prompt_len, output_len), three whole numbers of at least 1")
    count, prompt, output = cast(tuple[int, int, int], got)
    load = f"{count} requests of {prompt} + {output} tokens on {server}"
    require(prompt + output <= length, f"{load}: more than max_model_len {length}, so they are refused")
    usable = blocks - 1
    need = _blocks(prompt + output - 1, size)  # the last token's K and V are never needed
    require(need <= usable, f"{load}: one alone needs {need} blocks, and {usable} are given out")
    require(count <= sequences, f"{load}: those above max_num_seqs wait, which is no preemption")
    start = count * _blocks(prompt, size)
    require(
        start <= usable,
        f"{load}: their prompts take {start} blocks of the {usable} that are given out, so some wait and are not "
        "preempted",
    )
    peak = count * need
    require(peak > usable, f"{load}: at their longest they take {peak} blocks of {usable}, which is not too many")


@overcommit.invariant("a small server", stops=True)
def _(answer) -> None:
    judge(answer(40, 32, 16, 512), 40, 32, 16, 512)


@overcommit.invariant("servers of other sizes", share=2)
def _(answer) -> None:
    for server in ((100, 16, 8, 512), (64, 16, 64, 512), (1000, 128, 256, 32768), (20, 32, 4, 400), (33, 16, 2, 512)):
        judge(answer(*server), *server)


NAME = "vllm:num_preemptions_total"


def _increase(answer, before: str, after: str, want: float, look_at: str) -> None:
    got = answer(before, after, NAME)
    require(isinstance(got, int | float) and got == want, f"{look_at}: {got!r}, {want} expected")


@counter_increase.invariant("the difference of two scrapes")
def _(answer) -> None:
    before, after = scrape({NAME: [3.0]}), scrape({NAME: [30.0]})
    _increase(answer, before, after, 27.0, "3 before and 30 after: is what was there before taken off?")


@counter_increase.invariant("a sum over all engines")
def _(answer) -> None:
    before, after = scrape({NAME: [3.0, 10.0]}), scrape({NAME: [4.0, 15.0]})
    _increase(answer, before, after, 6.0, "engine 0 from 3 to 4, engine 1 from 10 to 15: both count")


@counter_increase.invariant("no other metric, and no comment")
def _(answer) -> None:
    other = {
        "vllm:request_num_preemptions_total": [100.0], "vllm:num_preemptions": [50.0], f"{NAME}_by_reason": [60.0],
    }  # fmt: skip
    before, after = scrape({NAME: [1.0]}), scrape({NAME: [2.5], **other})
    _increase(
        answer, before, after, 1.5, "names that only begin with this one or contain it, and text of HELP, do not count"
    )


@counter_increase.invariant("large values")
def _(answer) -> None:
    _increase(answer, scrape({NAME: [0.0]}), scrape({NAME: [1.5e6]}), 1.5e6, "1500000 may be written 1.5e+06")


@counter_increase.invariant("an engine that started in between")
def _(answer) -> None:
    _increase(answer, scrape({}), scrape({NAME: [4.0]}), 4.0, "a counter that was not there yet stood at 0")


QUESTIONS = [overcommit, counter_increase]
