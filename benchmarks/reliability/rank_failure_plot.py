"""Rank failures as a picture: when each survivor got its error, and when calls worked again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

COLORS = {"pycomm-shm": "#0b8043", "pycomm-tcp": "#1a73e8", "gloo": "#9aa0a6"}


def save(path: Path, found: Sequence[Mapping[str, Any]]) -> None:
    """Draws the rows that rank_failure.py stores: a panel for the errors and one for
    the recovery; a dot for each survivor."""
    figure = Figure(figsize=(10, 4.2), layout="constrained")
    noticed, works = figure.subplots(1, 2, sharey=True)
    _panel(noticed, found, [failure["noticed_ms"] for failure in found])
    noticed.set(title="the survivor's call has ended", ylabel="ms since the death")
    _panel(works, found, [failure["works_ms"] for failure in found])
    works.set(title="a call of the shrunken group was right")
    noticed.legend(frameon=False)
    figure.savefig(path, dpi=150)


def _panel(axes: Axes, found: Sequence[Mapping[str, Any]], times_ms: Sequence[float]) -> None:
    kinds = sorted({(failure["ranks"], failure["moment"]) for failure in found})
    backends = [name for name in COLORS if any(failure["backend"] == name for failure in found)]
    scatter = np.random.default_rng(0)
    for i, backend in enumerate(backends):
        dots = [
            (kinds.index((failure["ranks"], failure["moment"])) + 0.25 * (i - 1), time_ms)
            for failure, time_ms in zip(found, times_ms, strict=True)
            if failure["backend"] == backend and time_ms >= 0
        ]
        places = np.array([place for place, _ in dots]) + scatter.uniform(-0.08, 0.08, len(dots))
        heights = [time_ms for _, time_ms in dots]
        axes.scatter(places, heights, s=9, alpha=0.7, color=COLORS[backend], label=backend)
    names = [f"{ranks} ranks,\n{moment}" for ranks, moment in kinds]
    axes.set_xticks(range(len(kinds)), names, fontsize=7)  # larger names overlap
    axes.set_yscale("log")
    axes.grid(axis="y", alpha=0.25)
