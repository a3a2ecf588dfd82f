"""The plots of the demo and the benchmarks: panels in one style. Needs matplotlib."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from pycomm.bench.support.sizes import format_size

COLORS = {"pycomm": "#1a73e8", "pycomm-direct": "#12b5cb", "gloo": "#9aa0a6", "fake": "#dadce0"}
COLORS |= {"pycomm-shared": "#0b8043"}
COLORS |= {"wrapper": "#188038", "dgc": "#e8710a", "fused": "#f9ab00"}  # pycomm.DataParallel
LIMIT: Any = {"ls": "--", "lw": 1, "color": "#d93025"}

Panel = Callable[[Axes], object]
Row = TypeVar("Row")


def save(
    path: Path, panels: Mapping[str, Panel], caption: str, size: tuple[float, float], columns: int
) -> None:
    """Draws a panel for each title, of so many inches. The format follows the suffix of `path`."""
    columns = min(columns, len(panels))
    rows = -(-len(panels) // columns)
    figure = Figure(figsize=(size[0] * columns, size[1] * rows), layout="constrained")
    grid = figure.subplots(rows, columns, squeeze=False).flat
    for axes, panel in itertools.zip_longest(grid, panels.items()):
        if panel is None:
            axes.set_visible(False)
            continue
        panel[1](axes)
        axes.set_title(panel[0])
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(caption, fontsize=9, color="#5f6368")
    figure.savefig(path, dpi=150)


def grouped(
    rows: Iterable[Row],
    title: Callable[[Row], str],
    draw: Callable[[Sequence[Row], Axes], object],
) -> dict[str, Panel]:
    """A panel for each title, which draws the rows that have it."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(title(row), []).append(row)
    return {name: functools.partial(draw, own) for name, own in groups.items()}


def lines(axes: Axes, rows: Iterable[Any], fields: Sequence[str], **settings: Any) -> None:
    """A line for each value of the first field: the third over the second, and a legend. The
    settings are those of Axes.set()."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        name, x, y = (getattr(row, field) for field in fields)
        found.setdefault(name, []).append((x, y))
    for name in sorted(found, key=lambda name: not name.startswith("pycomm")):
        color = COLORS.get(name)
        axes.plot(*zip(*found[name], strict=True), "o-", ms=3.5, color=color, label=name)
    axes.set(**settings)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False, fontsize=8)


def byte_ticks(axes: Axes, sizes: Iterable[int]) -> None:
    """Labels these numbers of bytes on the axis of x, which becomes logarithmic."""
    axes.set(xscale="log", xlabel="bytes")
    axes.set_xticks(sorted(set(sizes)), minor=False)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(max(1, int(x)))))
    axes.minorticks_off()


def bars(axes: Axes, heights: Mapping[str, float], labels: Sequence[str], ylabel: str) -> None:
    """A bar for each name, with its label."""
    colors = [COLORS.get(name, COLORS["pycomm"]) for name in heights]
    drawn = axes.bar(list(heights), list(heights.values()), color=colors)
    axes.bar_label(drawn, labels, fontsize=8)
    axes.set(ylabel=ylabel)
    axes.margins(y=0.12)
