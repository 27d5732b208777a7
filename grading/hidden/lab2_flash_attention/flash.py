"""Hidden checks of lab 2: FlashAttention.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check
from labkit.checks import compare
from labkit.checks.lab2_flash_attention.cases import Case, attention, make_case
from labkit.checks.lab2_flash_attention.flash import ragged
from labkit.checks.values import close

LAB = "lab2_flash_attention"


def attend(function: str, q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, options: dict) -> np.ndarray:
    """Driver: one call on views with garbage around them."""
    import torch

    from labkit.checks.values import run_kernel

    def framed(x):
        whole = torch.full((x.shape[0] + 20, x.shape[1] + 2, x.shape[2]), 33.0).to(torch.from_numpy(x).dtype)
        whole[9 : 9 + x.shape[0], 1 : 1 + x.shape[1]] = torch.from_numpy(x)
        return whole.to(labkit.device.name())[9 : 9 + x.shape[0], 1 : 1 + x.shape[1]]

    return run_kernel(globals()[function], framed(q), framed(k), framed(v), scale, **options)


def equals_dense(remote: Remote, function: str, case: Case, look_at: str, **options: int) -> None:
    """Send a case and compare what comes back with dense attention."""
    arrays = (x.cpu().numpy() for x in (case.q, case.k, case.v))
    got = torch.from_numpy(np.asarray(remote.call(attend, function, *arrays, case.scale, options)))
    compare.close(got, attention(case, torch.float64), attention(case, case.q.dtype), look_at=look_at)


@hidden_check(LAB, "flash_forward")
def odd_lengths(remote: Remote) -> None:
    for a, b in ((63, 65), (3, 129)):
        equals_dense(remote, "flash_forward", make_case(a, b, heads=2, seed=a), f"{a} queries, {b} keys")


@hidden_check(LAB, "flash_forward")
def moving_maximum(remote: Remote) -> None:
    case = make_case(33, 200, loudness=5.0, rising=True, seed=203)
    equals_dense(remote, "flash_forward", case, "scores that grow along the keys")


@hidden_check(LAB, "flash_forward")
def wide_heads_in_fp32(remote: Remote) -> None:
    case = make_case(20, 70, head_dim=128, seed=204)
    equals_dense(remote, "flash_forward", case, "head_dim 128, tiles of 16 and 32", block_m=16, block_n=32)


@hidden_check(LAB, "flash_forward")
def quiet_scores(remote: Remote) -> None:
    equals_dense(remote, "flash_forward", make_case(40, 90, loudness=0.3, seed=205), "small scores: which base?")


@hidden_check(LAB, "flash_causal")
def causal_tiles(remote: Remote) -> None:
    for n, m, b in ((129, 64, 64), (50, 16, 32), (75, 32, 16)):
        case = make_case(n, heads=2, causal=True, seed=n)
        equals_dense(remote, "flash_causal", case, f"{n} rows, tiles {m} and {b}", block_m=m, block_n=b)


@hidden_check(LAB, "flash_causal")
def a_chunk_of_a_prompt(remote: Remote) -> None:
    for a, b in ((1, 70), (20, 131)):
        case = make_case(a, b, causal=True, seed=a + 300)
        equals_dense(remote, "flash_causal", case, f"the last {a} rows of {b}", block_m=16, block_n=32)


@hidden_check(LAB, "flash_causal")
def loud_and_causal(remote: Remote) -> None:
    case = make_case(100, causal=True, loudness=20.0, rising=True, seed=302)
    equals_dense(remote, "flash_causal", case, "large scores that grow", block_m=32, block_n=32)


@hidden_check(LAB, "flash_grouped")
def groups(remote: Remote) -> None:
    for heads, kv_heads in ((6, 2), (4, 4), (4, 1)):
        case = make_case(37, heads=heads, kv_heads=kv_heads, causal=True, seed=heads + 400)
        equals_dense(remote, "flash_grouped", case, f"{heads} query heads, {kv_heads} KV heads", block_m=32, block_n=32)


@hidden_check(LAB, "flash_grouped")
def grouped_chunk(remote: Remote) -> None:
    case = make_case(10, 60, heads=4, kv_heads=2, causal=True, seed=402)
    equals_dense(remote, "flash_grouped", case, "the last 10 rows of 60", block_m=16, block_n=16)


@hidden_check(LAB, "flash_causal")
def tiles_past_the_diagonal(remote: Remote) -> None:
    _skips_unseen_tiles(remote, "flash_causal", make_case(64, 96, heads=2, causal=True, seed=303))


@hidden_check(LAB, "flash_grouped")
def grouped_tiles_past_the_diagonal(remote: Remote) -> None:
    _skips_unseen_tiles(remote, "flash_grouped", make_case(64, 96, heads=4, kv_heads=2, causal=True, seed=403))


def _skips_unseen_tiles(remote: Remote, function: str, case: Case) -> None:
    """64 rows of 96, tiles of 32: the first row tile sees 64 columns. Others would make it NaN, even with weight 0."""
    seen = Case(case.q[:32], case.k[:64], case.v[:64], case.scale, causal=True)
    wanted = _both(seen)
    case.v[64:] = np.nan
    arrays = (x.cpu().numpy() for x in (case.q, case.k, case.v))
    options = {"block_m": 32, "block_n": 16}
    got = torch.from_numpy(np.asarray(remote.call(attend, function, *arrays, case.scale, options)))
    close(got[:32], *wanted, look_at="are key tiles past the diagonal multiplied")


def _both(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    return attention(case, torch.float64), attention(case, case.q.dtype)


def attend_packed(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, cu: np.ndarray, longest: int, scale: float, options: dict
):
    """Driver: flash_varlen."""
    import torch

    from labkit.checks.values import run_kernel

    tensors = (torch.from_numpy(x).to(labkit.device.name()) for x in (q, k, v, cu))
    return run_kernel(flash_varlen, *tensors, longest, scale, **options)


def _packed(remote: Remote, lengths: list[int], seed: int) -> None:
    case = make_case(sum(lengths), heads=4, kv_heads=2, causal=True, seed=seed)
    starts = [0, *np.cumsum(lengths).tolist()]
    arrays = (x.cpu().numpy() for x in (case.q, case.k, case.v))
    cu = np.array(starts, dtype=np.int32)
    got = torch.from_numpy(np.asarray(remote.call(attend_packed, *arrays, cu, max(lengths), case.scale, {})))
    compare.close(
        got, ragged(case, starts, torch.float64), ragged(case, starts, torch.float16), look_at=f"lengths {lengths}"
    )


@hidden_check(LAB, "flash_varlen")
def ragged_batches(remote: Remote) -> None:
    _packed(remote, [31, 2, 33, 50], 501)


@hidden_check(LAB, "flash_varlen")
def empty_between(remote: Remote) -> None:
    _packed(remote, [0, 32, 0, 65, 0], 502)


@hidden_check(LAB, "flash_varlen")
def packed_tiles_past_the_diagonal(remote: Remote) -> None:
    case = make_case(20 + 64, heads=4, kv_heads=2, causal=True, seed=503)
    seen = Case(case.q[20:52], case.k[20:52], case.v[20:52], case.scale, causal=True)  # one tile of the second sequence
    wanted = _both(seen)
    case.v[52:] = np.nan  # whoever multiplies by such a tile has NaN, even with weights of 0
    arrays = (x.cpu().numpy() for x in (case.q, case.k, case.v))
    cu, options = np.array([0, 20, 84], dtype=np.int32), {"block_m": 32, "block_n": 32}
    got = torch.from_numpy(np.asarray(remote.call(attend_packed, *arrays, cu, 64, case.scale, options)))
    close(got[20:52], *wanted, look_at="are key tiles past a sequence's diagonal multiplied")
