"""Pictures of a kernel on its machine: what fits on an SM, and which elements a program touches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.colors import BoundaryNorm, ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from labkit.compiled.arch import Occupancy, limits_of, occupancy
from labkit.plots.style import FAINT, INK, PALE, STYLE, colour, figure

MOST_ROWS, MOST_COLUMNS = 256, 512  # of a tensor's picture; beyond them several elements share a cell


def occupancy_chart(
    arch: str, threads: int, marks: Mapping[str, tuple[int, int]] | None = None, *, registers_from: int = 16
) -> Figure:
    """Warps that an SM of `arch` holds, over registers a thread and shared memory a block, for blocks of `threads`.

    marks: name -> (registers, bytes of shared memory) of kernels to be pointed out.
    """
    limits = limits_of(arch)
    registers = np.arange(registers_from, limits.registers_per_thread + 1)
    shared = np.arange(0, limits.shared_per_block + 1, 1024)
    warps = np.array(
        [[occupancy(arch, threads=threads, registers=int(r), shared=int(s)).warps for r in registers] for s in shared]
    )
    with figure(8.0, 4.8) as (made, axes):
        levels = np.unique(warps)
        shades = plt.get_cmap("cividis")(np.linspace(0.12, 1, len(levels)))
        edges = [*((levels[1:] + levels[:-1]) / 2)]
        norm = BoundaryNorm([levels[0] - 0.5, *edges, levels[-1] + 0.5], len(levels))
        image = axes.pcolormesh(
            registers, shared / 1024, warps, cmap=ListedColormap(shades), norm=norm, shading="nearest"
        )
        bar = made.colorbar(image, ax=axes, ticks=levels[:: max(1, len(levels) // 12)])
        bar.set_label(f"warps on an SM, of {limits.warps}")
        for name, (used, taken) in (marks or {}).items():
            at: Occupancy = occupancy(arch, threads=threads, registers=used, shared=taken)
            axes.plot(used, taken / 1024, marker="o", markersize=9, color="white", markeredgecolor=INK)
            side = -1 if used > (registers[0] + registers[-1]) / 2 else 1
            axes.annotate(
                f"{name}: {at.warps} warps", (used, taken / 1024), xytext=(9 * side, 7), textcoords="offset points",
                ha="left" if side > 0 else "right", fontsize=9,
                bbox={"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.9},
            )  # fmt: skip
        axes.grid(visible=False)
        axes.set_xticks(range(32, limits.registers_per_thread + 1, 32))
        axes.set_yticks(range(0, limits.shared_per_block // 1024 + 1, 32))
        axes.set(xlabel="registers a thread", ylabel="shared memory a block (KiB)")
        axes.set_title(f"What fits on an SM of {arch}, in blocks of {threads} threads")
    return made


class Touched(Protocol):
    """What `access_chart` draws: see labkit.access_map.AccessMap."""

    @property
    def kernel(self) -> str: ...
    @property
    def program(self) -> tuple[int, int, int]: ...
    @property
    def loaded(self) -> Mapping[str, np.ndarray]: ...
    @property
    def stored(self) -> Mapping[str, np.ndarray]: ...
    @property
    def arguments(self) -> Sequence[str]: ...
    @property
    def outside(self) -> Sequence[object]: ...


STATES = ("untouched", "loaded once", "loaded again", "stored", "loaded and stored")
SHADES = (PALE, colour(4), colour(0), colour(1), colour(2))


def access_chart(access: Touched) -> Figure:
    """Each tensor that one program touched, its last dimension across and all others down, coloured by what was done.

    Beyond 256 x 512 elements, a cell stands for several and shows the most that befell one of them.
    """
    if not access.arguments:
        raise ValueError(f"access: program {access.program} of {access.kernel} touches no tensor")
    grids = {name: _states(access.loaded.get(name), access.stored.get(name)) for name in access.arguments}
    heights = [min(max(0.55, 0.035 * grid.shape[0]), 3.2) for grid in grids.values()]
    with plt.rc_context(STYLE):
        made, rows = plt.subplots(
            len(grids), 1, figsize=(8.0, sum(heights) + 0.75 * len(grids) + 0.9), layout="constrained", squeeze=False,
            gridspec_kw={"height_ratios": heights},
        )  # fmt: skip
        norm = BoundaryNorm(np.arange(len(STATES) + 1) - 0.5, len(STATES))
        for axes, (name, grid) in zip(rows[:, 0], grids.items(), strict=True):
            axes.imshow(_shrunk(grid), cmap=ListedColormap(SHADES), norm=norm, aspect="auto", interpolation="nearest",
                        extent=(-0.5, grid.shape[1] - 0.5, grid.shape[0] - 0.5, -0.5))  # fmt: skip
            axes.grid(visible=False)
            axes.spines[:].set(visible=True, color=FAINT)
            counts = access.loaded[name] if name in access.loaded else access.stored[name]
            axes.set_title(f"{name} [{', '.join(map(str, counts.shape))}]", fontsize=9.5)
            axes.set_yticks(_ticks(grid.shape[0], 5) if grid.shape[0] > 1 else [])
            axes.set_xticks(_ticks(grid.shape[1], 9))
        beyond = f"; {len(access.outside)} accesses left their tensor" if access.outside else ""
        made.suptitle(
            f"{access.kernel}, program {access.program}{beyond}", fontsize=11, fontweight="bold", x=0.01, ha="left"
        )
        used = sorted({int(state) for grid in grids.values() for state in np.unique(grid)} | {0})
        handles = [Patch(facecolor=SHADES[n], edgecolor=FAINT, label=STATES[n]) for n in used]
        made.legend(handles=handles, loc="outside lower left", ncols=len(handles), fontsize=9)
    return made


def _ticks(length: int, most: int) -> list[int]:
    """Indices to write beside an axis of this length: round ones, within it."""
    step = next(s for s in (10**p * f for p in range(12) for f in (1, 2, 5)) if length <= s * most)
    return list(range(0, length, step))


def _states(loaded: np.ndarray | None, stored: np.ndarray | None) -> np.ndarray:
    """The state of each element as an index into STATES, in two dimensions."""
    some = loaded if loaded is not None else stored
    assert some is not None
    loads = loaded if loaded is not None else np.zeros_like(some)
    stores = stored if stored is not None else np.zeros_like(some)
    states = np.select([(loads > 0) & (stores > 0), stores > 0, loads > 1, loads > 0], [4, 3, 2, 1], 0)
    return states.reshape(-1, states.shape[-1]) if states.ndim else states.reshape(1, 1)


def _shrunk(grid: np.ndarray) -> np.ndarray:
    """At most MOST_ROWS x MOST_COLUMNS cells, each the largest state in it."""
    for axis, most in ((0, MOST_ROWS), (1, MOST_COLUMNS)):
        if grid.shape[axis] > most:
            starts = np.linspace(0, grid.shape[axis], most, endpoint=False).astype(int)
            grid = np.maximum.reduceat(grid, starts, axis=axis)
    return grid
