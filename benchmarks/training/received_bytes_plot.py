"""Plots the bytes that a rank receives over the number of ranks, and the busiest owner's load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

WAYS = {"gather": "gather", "sharded": "sharded, k->k", "sharded4": "sharded, k->4k"}


def draw(path: Path, ranks: Sequence[Mapping[str, Any]], elements: int) -> None:
    """A panel of bytes for each sparsity, and one of the busiest owner."""
    levels = list(dict.fromkeys(row["sparsity"] for row in ranks))
    figure = Figure(figsize=(5.2 * (len(levels) + 1), 4), layout="constrained")
    *panels, last = figure.subplots(1, len(levels) + 1)
    for axes, level in zip(panels, levels, strict=True):
        own = [row for row in ranks if row["sparsity"] == level]
        sizes = [row["size"] for row in own]
        for key, label in WAYS.items():
            axes.plot(sizes, [row[key] / 1e6 for row in own], marker="o", label=label)
        ring = [2 * (size - 1) / size * 2 * elements / 1e6 for size in sizes]
        axes.plot(sizes, ring, ls="--", color="#9aa0a6", label="dense ring, bfloat16")
        axes.set(yscale="log", ylabel="MB received by a rank", title=f"{level}, 2-bit values")
        _over_ranks(axes, sizes)
    own = [row for row in ranks if row["sparsity"] == levels[0]]
    sizes = [row["size"] for row in own]
    for key, label in (("busiest", "blocks, rows turned"), ("busiest_range", "plain ranges")):
        last.plot(sizes, [row[key] for row in own], marker="o", label=label)
    last.set(yscale="log", ylabel="busiest owner / mean", title=f"elements to owners, {levels[0]}")
    _over_ranks(last, sizes)
    figure.suptitle(f"{elements / 1e6:.0f} M elements, index sets of a real training", fontsize=9)
    figure.savefig(path, dpi=150)


def _over_ranks(axes: Axes, sizes: Sequence[int]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, [str(size) for size in sizes])
    axes.set_xlabel("ranks")
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
