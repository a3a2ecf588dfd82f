"""Bandwidth over size, log-log, one panel for each verb and dtype, with the limit."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pycomm.bench.collectives.table import Line
from pycomm.bench.support.sizes import format_size

COLORS = {"pycomm": "#1a73e8", "pycomm-direct": "#12b5cb", "gloo": "#9aa0a6", "fake": "#dadce0"}
COLORS |= {"pycomm-shared": "#0b8043"}
COLORS |= {"wrapper": "#188038", "dgc": "#e8710a", "fused": "#f9ab00"}  # pycomm.DataParallel


def save(path: Path, found: Sequence[Line], caption: str) -> None:
    """Draws `found` (at least one line); the format follows the suffix of `path`."""
    panels = list(dict.fromkeys((line.verb, line.dtype) for line in found))
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(6.5 * columns, 0.6 + 4.2 * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, (verb, dtype) in zip(grid, panels, strict=False):
        chosen = [line for line in found if (line.verb, line.dtype) == (verb, dtype)]
        _panel(axes, chosen)
        axes.set_title(f"{verb}, {dtype}")
    for axes in list(grid)[len(panels) :]:
        axes.set_visible(False)
    figure.suptitle(caption, fontsize=9, color="#5f6368")
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, chosen: Sequence[Line]) -> None:
    for peer in dict.fromkeys(line.peer for line in chosen):
        own = [line for line in chosen if line.peer == peer]
        sizes = [line.size_bytes for line in own]
        bandwidths = [line.algbw_gbs for line in own]
        axes.plot(sizes, bandwidths, marker="o", ms=3.5, lw=1.8, color=COLORS.get(peer), label=peer)
    limits = {line.size_bytes: line.size_bytes / line.limit_us / 1e3 for line in chosen}
    axes.plot(
        list(limits), list(limits.values()), "--", lw=1, color="#d93025", label="memory limit"
    )
    axes.set(xscale="log", yscale="log", xlabel="bytes", ylabel="algbw (GB/s)")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: _tick(x)))
    axes.set_xticks([4**i for i in range(1, 20) if min(limits) <= 4**i <= max(limits)], minor=False)
    axes.minorticks_off()
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)


def _tick(x: float) -> str:
    return format_size(int(x)) if x >= 1 else ""
