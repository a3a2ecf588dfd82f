"""The results of `bench kernels` as a plot: the fraction of the limit over size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from pycomm.bench.kernels.comparison import OURS
from pycomm.bench.kernels.table import Row
from pycomm.bench.support import machine


def save(path: Path, rows: Sequence[Row], settings: Mapping[str, Any]) -> None:
    """Draws one panel for each kernel."""
    where = machine.describe()
    place = settings.get("gpu") or f"{where['cpu']}, {settings['threads']} threads"
    names = list(dict.fromkeys(r.kernel for r in rows))
    figure = Figure(figsize=(14, 2.8 * -(-len(names) // 4)), layout="constrained")
    panels = figure.subplots(-(-len(names) // 4), 4, sharex=True, squeeze=False).flat
    for axes, name in zip_longest(panels, names):
        if name is None:
            axes.set_visible(False)
            continue
        peers = {r.peer for r in rows if r.kernel == name}
        for peer in sorted(peers, key=lambda p: (p != OURS, p)):  # pycomm in one colour
            own = [r for r in rows if (r.kernel, r.peer) == (name, peer)]
            axes.plot(
                [r.count for r in own], [r.limit_percent for r in own], "o-", ms=3, label=peer
            )
        axes.set(xscale="log", ylim=(0, 105), title=name)
        axes.axhline(100, ls="--", lw=1, color="#d93025")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, fontsize=8)
    figure.supxlabel("elements")
    figure.supylabel("% of the memory's limit")
    figure.suptitle(f"{place}, {where['date']}", fontsize=9)
    figure.savefig(path, dpi=150)
