"""The tiles of QK^T in the order in which FlashAttention walks them."""

from __future__ import annotations

import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from labkit.plots.style import FAINT, INK, STYLE, colour
from labkit.tilewalk import TileWalk, Visit


def tile_map(walk: TileWalk, step: int = -1) -> Figure:
    """The score matrix with its tiles, and the running values of the current rows, after visit number `step`.

    Outlined is the tile just taken in; hatched tiles are never loaded. Beside it stand m, l and acc of its rows, and
    alpha, by which what was summed before has just been multiplied.
    """
    visits = walk.visits[: step + 1] if step >= 0 else walk.visits
    now = visits[-1]
    with plt.rc_context(STYLE):
        made, (left, right) = plt.subplots(1, 2, figsize=(9.4, 4.6), layout="constrained", width_ratios=[1.15, 1])
        _draw_scores(left, walk, {(v.row_tile, v.key_tile) for v in visits})
        left.add_patch(
            Rectangle(
                (now.key_tile * walk.block_n - 0.5, now.row_tile * walk.block_m - 0.5), walk.block_n, walk.block_m,
                fill=False, edgecolor=colour(1), linewidth=3,
            )
        )  # fmt: skip
        skipped = (walk.seq_len // walk.block_m) * (walk.seq_len // walk.block_n) - len(walk.visits)
        left.set_title(f"tile {len(visits)} of {len(walk.visits)}, {skipped} never loaded")
        _draw_state(right, now, walk.block_m)
    return made


def _draw_scores(axes: Axes, walk: TileWalk, seen: set[tuple[int, int]]) -> None:
    shown = torch.full_like(walk.scores, float("nan"))
    for i, j in seen:
        rows, cols = slice(i * walk.block_m, (i + 1) * walk.block_m), slice(j * walk.block_n, (j + 1) * walk.block_n)
        shown[rows, cols] = walk.scores[rows, cols]
    shown[shown.isinf()] = float("nan")
    image = axes.imshow(shown.numpy(), cmap="cividis", vmin=-3, vmax=3)
    axes.figure.colorbar(image, ax=axes, shrink=0.7, label="score")
    for i in range(walk.seq_len // walk.block_m):
        for j in range(walk.seq_len // walk.block_n):
            if (i, j) not in walk.visited:
                corner = (j * walk.block_n - 0.5, i * walk.block_m - 0.5)
                axes.add_patch(
                    Rectangle(corner, walk.block_n, walk.block_m, facecolor="none", edgecolor=FAINT, hatch="//")
                )
    for edge in range(0, walk.seq_len + 1, walk.block_m):
        axes.axhline(edge - 0.5, color=FAINT, linewidth=0.8)
    for edge in range(0, walk.seq_len + 1, walk.block_n):
        axes.axvline(edge - 0.5, color=FAINT, linewidth=0.8)
    axes.grid(False)
    axes.set(xlabel="key", ylabel="query", xticks=range(0, walk.seq_len, 2), yticks=range(0, walk.seq_len, 2))


def _draw_state(axes: Axes, now: Visit, block_m: int) -> None:
    axes.axis("off")
    first = now.row_tile * block_m
    head = ["row", "alpha", "m", "l", "acc", "acc / l"]
    rows = []
    for r in range(block_m):
        acc, o = now.acc[r], now.acc[r] / now.l[r]
        pair = "({:+.2f}, {:+.2f})".format
        rows.append(
            [str(first + r), f"{now.alpha[r]:.2f}", f"{now.m[r]:+.2f}", f"{now.l[r]:.2f}", pair(*acc), pair(*o)]
        )
    table = axes.table([head, *rows], loc="center", cellLoc="center", colWidths=[0.09, 0.13, 0.14, 0.12, 0.29, 0.29])
    table.auto_set_font_size(False)
    table.set_fontsize(9)
    table.scale(1, 1.7)
    for cell in table.get_celld().values():
        cell.set_edgecolor(FAINT)
        cell.set_linewidth(0.5)
        cell.get_text().set_color(INK)
    axes.set_title(f"rows {first} to {first + block_m - 1}, after key tile {now.key_tile}")
