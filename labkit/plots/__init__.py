"""Figures of the notebooks, in one style that colour-blind readers can use. Each function gives a matplotlib Figure."""

from labkit.plots.charts import bars, race_chart, roofline_chart
from labkit.plots.ladder import ladder_chart
from labkit.plots.machine import access_chart, occupancy_chart
from labkit.plots.paging import memory_map, waste_by_block_size
from labkit.plots.recorded import evidence_chart
from labkit.plots.serving import PHASES, pareto_chart, phases, request_lanes
from labkit.plots.style import COLOURS, colour
from labkit.plots.tiles import tile_map
from labkit.plots.timeline import step_timeline

__all__ = [
    "COLOURS",
    "PHASES",
    "access_chart",
    "bars",
    "colour",
    "evidence_chart",
    "ladder_chart",
    "memory_map",
    "occupancy_chart",
    "pareto_chart",
    "phases",
    "race_chart",
    "request_lanes",
    "roofline_chart",
    "step_timeline",
    "tile_map",
    "waste_by_block_size",
]
