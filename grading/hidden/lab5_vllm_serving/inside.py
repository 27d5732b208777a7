"""Hidden checks of lab 5: graphs, admission, attention, and reading what was measured.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from kernels import reference
from labkit.checks import compare
from labkit.checks.lab5_vllm_serving import attention, graphs, measured, policy
from labkit.serve.plugins.policies import Waiting

LAB = "lab5_vllm_serving"


@hidden_check(LAB, "dispatch_batch")
def other_sizes(remote: Remote) -> None:
    sizes = [1, 3, 6, 24]
    for mode, most, tokens, decode in itertools.product(graphs.MODES, (5, 24), (1, 2, 4, 6, 7, 24, 25), (True, False)):
        got = remote.call("dispatch_batch", mode, sizes, most, tokens, decode)
        want = graphs.expected(mode, sizes, most, tokens, decode)
        what = f"{tokens} {'decodes' if decode else 'tokens'} under {mode}, sizes {sizes}, max_num_seqs {most}"
        require(list(got) == list(want), f"{what}: {got}, {want} expected")


def fit_on(pairs: list, most: int):
    """Driver: JSON has no whole numbers as keys."""
    return [int(size) for size in fit_capture_sizes(dict(pairs), most)]


def seconds_of(batches: int) -> float:
    """Driver: processor time of one answer."""
    import time

    began = time.process_time()
    fit_capture_sizes({batch: 1 + batch % 7 for batch in range(1, batches + 1)}, batches // 3)
    return time.process_time() - began


@hidden_check(LAB, "fit_capture_sizes")
def other_traffic(remote: Remote) -> None:
    for batches in range(8, 41, 4):  # an answer that tries everything would not end below
        took = remote.call(seconds_of, batches)
        require(took < graphs.SLOW_S, f"{took:.1f} s for {batches} batches and {batches // 3} sizes")
    rng = random.Random(21)
    for batches, most in ((1, 3), (9, 2), (9, 4), (40, 10), (90, 16)):
        steps = {batch: rng.choice([1, 3, 50, 900]) for batch in rng.sample(range(1, 200), batches)}
        sizes = list(remote.call(fit_on, [list(pair) for pair in steps.items()], most))
        good = sizes and len(sizes) <= most and sizes[-1] >= max(steps)
        require(bool(good), f"{len(sizes)} sizes for {most} graphs, up to {sizes[-1:]}; batches go up to {max(steps)}")
        rows, fewest = graphs.rows_computed(steps, sizes), graphs.best_rows(steps, most)
        require(rows <= fewest, f"{batches} batches, {most} sizes: {rows} rows, {fewest} are enough")


def admit(rows: list, patience: float):
    """Driver: ids in the order of the student's keys."""
    from labkit.serve.plugins.policies import Waiting as Request

    return [r.id for r in sorted((Request(*row) for row in rows), key=lambda r: admission_key(r, patience))]


@hidden_check(LAB, "admission_key")
def other_queues(remote: Remote) -> None:
    rng = random.Random(22)
    for patience in (0.0, 2.0, 60.0):
        rows: list[list] = [
            [str(n), rng.randint(1, 900), rng.randint(1, 900), round(rng.uniform(0, 90), 4)] for n in range(25)
        ]
        got = list(remote.call(admit, rows, patience))
        want = policy.expected([Waiting(*row) for row in rows], patience)
        require(got == want, f"25 requests, patience {patience:g} s: admitted {got}, {want} expected")


def attend(q, kv, table, lengths, starts, scale: float):
    """Driver: one call on views into one cache, as vLLM has it."""
    import torch

    k_cache, v_cache = torch.from_numpy(kv).transpose(1, 2).chunk(2, dim=-1)
    given = (torch.from_numpy(x) for x in (q, table, lengths, starts))
    query, block_table, seq_lens, cu_seqlens_q = given
    return own_attention(query, k_cache, v_cache, block_table, seq_lens, cu_seqlens_q, scale)


@hidden_check(LAB, "own_attention")
def other_batches(remote: Remote) -> None:
    for lengths, chunks, heads, kv_heads, block in (
        ([5, 64, 31], [5, 1, 12], 6, 3, 32), ([17] * 4, [17, 16, 2, 1], 4, 1, 16), ([1], [1], 2, 2, 16),
    ):  # fmt: skip
        batch = attention.batch(lengths, chunks, heads, kv_heads, 64, block, seed=23)
        q, k_cache, v_cache, table, seq_lens, starts = batch
        oracle, peer = (reference.paged_prefill(*batch, scale=0.11, dtype=d)[0] for d in (torch.float64, torch.float16))
        kv_cache = torch.cat((k_cache, v_cache), -1).transpose(1, 2).contiguous()
        arrays = (x.numpy() for x in (q, kv_cache, table, seq_lens, starts))
        got = torch.from_numpy(np.asarray(remote.call(attend, *arrays, 0.11)))
        compare.close(got, oracle, peer, look_at=f"lengths {lengths}, new tokens {chunks}, {heads}/{kv_heads} heads")


def gap_of(reference_pairs: list, served_pairs: list):
    """Driver: JSON has no whole numbers as keys."""
    largest, divergence = logprob_gap(dict(reference_pairs), dict(served_pairs))
    return [float(largest), float(divergence)]


@hidden_check(LAB, "logprob_gap")
def other_models(remote: Remote) -> None:
    rng = random.Random(24)
    for listed in (60, 12):
        p, q = (measured.normalised({n: rng.gauss(0, 1.5) for n in range(60)}) for _ in "pq")
        p, q = (dict(sorted(m.items(), key=lambda item: -item[1])[:listed]) for m in (p, q))
        got = remote.call(gap_of, [list(i) for i in p.items()], [list(i) for i in q.items()])
        want = measured.gap(p, q)
        near = all(abs(a - b) < 1e-6 for a, b in zip(got, want, strict=True))
        require(near, f"the top {listed} of 60 tokens: {got}, {want} expected")


def effects_of(rows: list):
    """Driver: the four cells as rows, since JSON has no tuples as keys."""
    found = main_effects({(bool(c), bool(g)): times for c, g, times in rows})
    return [float(found[name]) for name in ("caching", "graphs", "interaction")]


@hidden_check(LAB, "main_effects")
def other_switches(remote: Remote) -> None:
    rng = random.Random(25)
    for _ in range(4):
        cells = {(c, g): [rng.uniform(1, 90) for _ in range(3)] for c in (False, True) for g in (False, True)}
        got = remote.call(effects_of, [[c, g, times] for (c, g), times in cells.items()])
        want = list(measured.effects(cells).values())
        near = all(math.isclose(a, b, rel_tol=1e-9) for a, b in zip(got, want, strict=True))
        require(near, f"caching, graphs, interaction of random runs: {got}, {want} expected")
