"""Pictures of a paged KV cache: who owns which block, and what is wasted."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Protocol

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from matplotlib.ticker import FixedLocator, NullLocator, PercentFormatter

from labkit.plots.style import FAINT, INK, MARKERS, PALE, colour, figure

GAP = 0.12  # between blocks, in blocks


class Pool(Protocol):
    """A block pool at one moment: for each block the ids of its owners and the tokens in it; ids of all requests."""

    @property
    def step(self) -> int: ...
    @property
    def block_size(self) -> int: ...
    @property
    def owners(self) -> Sequence[Sequence[int]]: ...
    @property
    def filled(self) -> Sequence[int]: ...
    @property
    def running(self) -> Sequence[int]: ...
    @property
    def waiting(self) -> Sequence[int]: ...


def memory_map(pool: Pool, columns: int = 8) -> Figure:
    """Every block of a pool with its token slots: coloured by request, hatched where shared, pale where empty.

    The number in a block is its owner's id, several ids where it is shared; the small one is the block's own.
    """
    if not (len(pool.owners) == len(pool.filled) and columns > 0):
        raise ValueError("pool: owners and filled must have one entry a block, and columns must be positive")
    rows = max(-(-len(pool.owners) // columns), 1)
    with figure(8.6, 0.78 * rows + 1.35) as (made, axes):
        for block, (owners, filled) in enumerate(zip(pool.owners, pool.filled, strict=True)):
            _draw_block(axes, block, owners, filled, pool.block_size, columns)
        axes.set(xlim=(-GAP, columns), ylim=(rows, -0.05))
        axes.axis("off")
        free = sum(not o for o in pool.owners)
        empty = sum(pool.block_size - f for o, f in zip(pool.owners, pool.filled, strict=True) if o)
        waiting = f", {len(pool.waiting)} waiting" if pool.waiting else ""
        axes.set_title(
            f"step {pool.step}: {len(pool.running)} running{waiting}; {free} of {len(pool.owners)} blocks free, "
            f"{empty} slots reserved and empty"
        )
        made.legend(handles=_map_legend(), loc="outside lower left", ncols=4, fontsize=9)
    return made


def _draw_block(axes: Axes, block: int, owners: Sequence[int], filled: int, block_size: int, columns: int) -> None:
    x, y, width, height = block % columns, block // columns, 1 - GAP, 0.72
    face = colour(owners[0]) if owners else PALE
    slot = width / block_size
    axes.add_patch(Rectangle((x, y), width, height, facecolor=_pale(face) if owners else PALE, edgecolor="none"))
    if owners and filled:
        tokens = Rectangle((x, y), slot * filled, height, facecolor=face, edgecolor="white", linewidth=0)
        tokens.set_hatch("////" if len(owners) > 1 else "")
        axes.add_patch(tokens)
    for n in range(1, block_size if block_size <= 32 else 1):
        axes.plot([x + n * slot] * 2, [y, y + height], color="white", linewidth=0.6)
    axes.add_patch(Rectangle((x, y), width, height, fill=False, edgecolor=INK if owners else FAINT, linewidth=0.9))
    axes.text(x + 0.02, y + height + 0.04, str(block), fontsize=7, color=FAINT, va="top")
    if owners:
        plate = {"boxstyle": "round,pad=0.2", "facecolor": "white", "edgecolor": "none", "alpha": 0.9}
        names = ", ".join(map(str, owners)) if len(owners) < 4 else f"{owners[0]} and {len(owners) - 1} more"
        axes.text(x + width / 2, y + height / 2, names, ha="center", va="center", fontsize=9, color=INK, bbox=plate)


def _map_legend() -> list[Patch]:
    face = colour(0)
    return [
        Patch(facecolor=face, edgecolor=INK, label="tokens of a request"),
        Patch(facecolor=face, edgecolor="white", hatch="////", label="shared by several"),
        Patch(facecolor=_pale(face), edgecolor=INK, label="reserved, empty"),
        Patch(facecolor=PALE, edgecolor=FAINT, label="free"),
    ]


def _pale(face: str) -> tuple[float, float, float]:
    r, g, b = (0.25 * c + 0.75 for c in to_rgb(face))
    return r, g, b


def waste_by_block_size(
    block_sizes: Sequence[int],
    waste: Mapping[str, Sequence[float]],
    marks: Mapping[int, str] | None = None,
) -> Figure:
    """Share of allocated memory that holds no token, over the block size, a line for each law of lengths.

    waste: law -> a fraction between 0 and 1 for each block size. marks: block sizes to point out, with their names.
    """
    for law, values in waste.items():
        if len(values) != len(block_sizes):
            raise ValueError(f"waste[{law!r}] has {len(values)} values for {len(block_sizes)} block sizes")
    with figure(8.0, 4.4) as (made, axes):
        top = 1.12 * max([0.01, *(v for values in waste.values() for v in values)])
        for number, (law, values) in enumerate(waste.items()):  # ever smaller, so that no line hides an equal one
            axes.plot(
                block_sizes, values, label=law, color=colour(number), marker=MARKERS[number % len(MARKERS)],
                markersize=max(10 - 2 * number, 4), linewidth=max(3.2 - 0.8 * number, 1.2),
            )  # fmt: skip
        names = {size: textwrap.fill(name, 7) for size, name in (marks or {}).items()}
        for size, name in names.items():
            axes.axvline(size, color=FAINT, linewidth=1, linestyle=":", zorder=0)
            axes.annotate(name, (size, top), xytext=(0, 3), textcoords="offset points", ha="center", va="bottom",
                          fontsize=8.5, color=INK, annotation_clip=False)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_locator(FixedLocator(list(block_sizes)))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0f}")
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set(ylim=(0, top), xlabel="block size (tokens, logarithmic)", ylabel="allocated and empty")
        lines = max([0, *(name.count("\n") + 1 for name in names.values())])
        axes.set_title("What paging wastes, by block size and law of lengths", pad=8 + 13 * lines)
        axes.legend(title="lengths", loc="upper left", alignment="left")
    return made
