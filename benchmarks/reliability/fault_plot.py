"""The fault matrix as a picture: milliseconds until the last survivor detected the fault."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure

LEAST_MS, MOST_MS = 0.1, 3000.0
NOT_DETECTED = 0.0  # of a cell without anything to detect


def save(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Draws what faults.py stores for each cell: a row for each action and moment, a column for
    each verb, size and transport; grey: not applicable; a cross: a violated guarantee."""
    cells = [one["cell"] for one in found]
    rows = list(dict.fromkeys((cell["action"], cell["moment"]) for cell in cells))
    columns = sorted({_column(cell) for cell in cells})
    worst = np.full((len(rows), len(columns)), np.nan)
    broken = []
    for one, cell in zip(found, cells, strict=True):
        row = rows.index((cell["action"], cell["moment"]))
        column = columns.index(_column(cell))
        known = [seen["noticed_ms"] for seen in one["seen"] if seen is not None and seen["error"]]
        worst[row, column] = np.nanmax([worst[row, column], *known, NOT_DETECTED])
        if one["broken"]:
            broken.append((row, column))
    figure = Figure(
        figsize=(0.24 * len(columns) + 3.5, 0.24 * len(rows) + 2.6), layout="constrained"
    )
    axes = figure.subplots()
    axes.set_facecolor("#dadce0")
    image = axes.imshow(
        np.clip(worst, LEAST_MS, MOST_MS), norm=LogNorm(LEAST_MS, MOST_MS), cmap="YlGnBu"
    )
    axes.set_xticks(range(len(columns)), [f"{verb}, {size}" for _, size, verb in columns])
    axes.set_yticks(range(len(rows)), [f"{action}, {moment}" for action, moment in rows])
    axes.tick_params(axis="x", rotation=90, labelsize=6.5)
    axes.tick_params(axis="y", labelsize=7.5)
    for column in range(1, len(columns)):
        if columns[column][0] != columns[column - 1][0]:
            axes.axvline(column - 0.5, color="white", lw=3)
    for row, column in broken:
        axes.plot(column, row, "x", color="#d93025")
    transports = ", then ".join(dict.fromkeys(transport for transport, _, _ in columns))
    kept = sum(not one["broken"] for one in found)
    axes.set_title(f"{kept} of {len(found)} cells as guaranteed; by {transports}", fontsize=9)
    figure.colorbar(image, label="ms until the last survivor detected it", shrink=0.8)
    figure.savefig(path, dpi=150)


def _column(cell: Mapping[str, str]) -> tuple[str, str, str]:
    return cell["transport"], cell["size"], cell["verb"]
