"""Hidden checks of lab 2: the five corrected kernels. Each has one check, about its own fault.

Drivers use names of the notebook, which this module does not have: their source is sent to the student's process.
"""

from __future__ import annotations

import numpy as np
import torch

from grading.blackbox import Remote, hidden_check, require
from grading.hidden.lab2_flash_attention.kernels import launching, random
from labkit.checks import compare

LAB = "lab2_flash_attention"


@hidden_check(LAB, "fixed_row_max")
def negative_rows(remote: Remote) -> None:
    for cols in (5, 77):
        x = -2 - np.abs(random(3, cols, seed=cols))
        x[1] *= np.float32(1e33)
        compare.equal(remote.call(launching, "fixed_row_max", x), x.max(axis=1), f"the maxima of rows of {cols}")


def on_slice(x: np.ndarray, factor: np.ndarray) -> np.ndarray:
    """Driver: fixed_scale_rows on a slice of a wider tensor."""
    import torch

    from labkit.checks.values import run_kernel

    device = labkit.device.name()
    return run_kernel(fixed_scale_rows, torch.from_numpy(x).to(device)[:, 3:40], torch.from_numpy(factor).to(device))


@hidden_check(LAB, "fixed_scale_rows")
def slices(remote: Remote) -> None:
    x, factor = random(7, 61, seed=1), random(7, seed=2)
    compare.equal(remote.call(on_slice, x, factor), x[:, 3:40] * factor[:, None], "scaled rows of a slice")


@hidden_check(LAB, "fixed_sum_of_squares")
def long_rows(remote: Remote) -> None:
    x = random(3, 4000, seed=3, dtype=np.float16) * np.float16(50)
    got = torch.from_numpy(remote.call(launching, "fixed_sum_of_squares", x)).double()
    want = torch.from_numpy(x).double().square().sum(1)
    require(got.shape == want.shape, f"shape {tuple(got.shape)}, {tuple(want.shape)} expected")
    require(bool(((got - want).abs() / want < 1e-5).all()), f"sums {got.tolist()}, {want.tolist()} expected")


def shuffled_totals(x: np.ndarray, seed: int) -> np.ndarray:
    """Driver: fixed_running_total with the programs in another order."""
    import torch

    from labkit.checks.traffic import stays_inside

    return stays_inside(fixed_running_total, torch.from_numpy(x), shuffle=seed).result


@hidden_check(LAB, "fixed_running_total")
def any_order(remote: Remote) -> None:
    x = random(170, seed=4)
    got = remote.call(shuffled_totals, x, 11)
    error = np.abs(got.astype(np.float64) - x.astype(np.float64).cumsum()).max()
    require(error < 1e-3, f"with programs in another order the largest error is {error:.3g}")


def differences(n: int) -> list:
    """Driver: fixed_differences, refused where it launches no kernel or leaves its tensors."""
    import torch

    from labkit.checks.traffic import stays_inside

    return stays_inside(fixed_differences, torch.arange(n, dtype=torch.float32) ** 2).result.tolist()


@hidden_check(LAB, "fixed_differences")
def nothing_outside(remote: Remote) -> None:
    for n in (64, 129):
        result = remote.call(differences, n)
        require(result == [2.0 * i + 1 for i in range(n - 1)], f"the differences of {n} squares are wrong")
