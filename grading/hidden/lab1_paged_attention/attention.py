"""Hidden checks of lab 1: writing through slots, attention through block tables.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check
from labkit.checks import compare
from labkit.checks.lab1_paged_attention.cases import Case, attention, make_case

LAB = "lab1_paged_attention"


def write(k: np.ndarray, v: np.ndarray, both: np.ndarray, slots: np.ndarray):
    """Driver: write into the K and V views of one tensor and give the whole tensor back."""
    import torch

    device = labkit.device.name()
    new_k, new_v, cache, mapping = (torch.from_numpy(x).to(device) for x in (k, v, both, slots))
    write_kv(new_k, new_v, cache[:, 0], cache[:, 1], mapping)
    return cache


@hidden_check(LAB, "write_kv")
def scattered_writes(remote: Remote) -> None:
    rng = np.random.default_rng(8)
    for dtype in (np.float16, np.float32):
        both = rng.standard_normal((11, 2, 16, 3, 64)).astype(dtype)
        slots = rng.permutation(11 * 16)[:40].astype(np.int64)
        slots[::7] = -1
        k, v = (rng.standard_normal((40, 3, 64)).astype(dtype) for _ in "kv")
        want = both.copy()
        for row, slot in enumerate(slots):
            if slot >= 0:
                want[slot // 16, 0, slot % 16], want[slot // 16, 1, slot % 16] = k[row], v[row]
        compare.equal(remote.call(write, k, v, both, slots), want, "the cache")


def attend(function: str, arrays: list, q: np.ndarray, k: np.ndarray, v: np.ndarray, options: dict):
    """Driver: one decode step on views whose strides all differ. arrays: block table and lengths.

    Two of the three must launch a kernel; torch may combine the parts of split_decode.
    """
    import torch

    from labkit.checks import values

    device = labkit.device.name()

    def view(x, *more):  # a view of x within a larger tensor of garbage
        whole = torch.full([n + m for n, m in zip(x.shape, more, strict=True)], 31.0, dtype=torch.from_numpy(x).dtype)
        inner = whole[tuple(slice(n) for n in x.shape)]
        inner.copy_(torch.from_numpy(x))
        return whole.to(device)[tuple(slice(n) for n in x.shape)]

    table, lens = (torch.tensor(x, dtype=torch.int32, device=device) for x in arrays)
    table = table.reshape(len(lens), -1)
    caches = view(k, 0, 2, 1, 0), view(v, 0, 1, 3, 0)
    arguments = (view(q, 0, 3, 8), *caches, table, lens, q.shape[-1] ** -0.5)
    if function == "gather_attention":
        return gather_attention(*arguments)
    refused = values.PRODUCTS | (set() if function == "split_decode" else values.REDUCTIONS)
    return values.run_launching(globals()[function], *arguments, refused=refused, **options)


def attend_equals_dense(remote: Remote, function: str, case: Case, look_at: str, **options: int) -> None:
    """Send a case and compare what comes back with dense attention."""
    tables = [case.block_table.tolist(), case.seq_lens.tolist()]
    arrays = (np.ascontiguousarray(x.cpu().numpy()) for x in (case.q, case.k_cache, case.v_cache))
    got = torch.from_numpy(np.asarray(remote.call(attend, function, tables, *arrays, options)))
    compare.close(got, attention(case, torch.float64), attention(case, case.q.dtype), look_at=look_at)


def _attention_checks(question: str) -> None:
    @hidden_check(LAB, question)
    def mixed_lengths(remote: Remote) -> None:
        case = make_case([64, 1, 0, 33, 31], num_heads=4, num_kv_heads=2, dtype=torch.float16, seed=101)
        attend_equals_dense(remote, question, case, "lengths 64, 1, 0, 33, 31 in fp16")

    @hidden_check(LAB, question)
    def eight_heads_share_one(remote: Remote) -> None:
        case = make_case([29, 8], num_heads=8, num_kv_heads=1, block_size=8, seed=102)
        attend_equals_dense(remote, question, case, "8 query heads share one KV head, block_size 8")

    @hidden_check(LAB, question)
    def loud_and_rising(remote: Remote) -> None:
        case = make_case([90], num_heads=1, num_kv_heads=1, loudness=25.0, rising=True, seed=103)
        attend_equals_dense(remote, question, case, "large scores that grow along the sequence")

    @hidden_check(LAB, question)
    def wide_heads(remote: Remote) -> None:
        case = make_case([21, 50], head_dim=128, block_size=32, dtype=torch.float16, seed=104)
        attend_equals_dense(remote, question, case, "head_dim 128, block_size 32, fp16")


for _question in ("gather_attention", "paged_decode", "split_decode"):
    _attention_checks(_question)


@hidden_check(LAB, "split_decode")
def odd_splits(remote: Remote) -> None:
    case = make_case([3, 55], num_heads=4, num_kv_heads=2, seed=105)
    for splits in (2, 7):
        attend_equals_dense(remote, "split_decode", case, f"num_splits={splits}", num_splits=splits)
