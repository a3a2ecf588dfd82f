"""Builds the table, demo.json and demo.png from the outcomes of the ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from rich.box import HEAVY_HEAD
from rich.text import Text

from pycomm._tables import Table
from pycomm.bench.support import plots, summaries
from pycomm.demo.rows import Row
from pycomm.demo.training import Outcome

MB = 2**20
COLORS = ("#9aa0a6", "#1a73e8", "#e8710a", "#188038", "#9334e6", "#d01884")
SMOOTHED_STEPS = 10


@dataclass(frozen=True)
class Result:
    """One row of the table. By step: mean losses and MB of the ranks, maximum of their seconds."""

    key: str
    name: str
    parameters: int
    final_loss: float
    seconds_per_step: float  # mean, because steps of LocalSGD differ
    mb_per_rank_and_step: float
    counted_by: str
    replicas_equal: bool
    digest: str  # of rank 0
    losses: list[float]
    seconds: list[float]
    mb: list[float]  # sent by a rank so far


def result(row: Row, outcomes: Sequence[Outcome]) -> Result:
    """Combines the outcomes of the ranks of `row`, in rank order."""
    seconds = [max(step) for step in zip(*(o.seconds for o in outcomes), strict=True)]
    mb = [statistics.mean(step) / MB for step in zip(*(o.sent for o in outcomes), strict=True)]
    first = outcomes[0]
    return Result(
        key=row.key,
        name=row.name,
        parameters=first.parameters,
        final_loss=first.final_loss,
        seconds_per_step=statistics.mean(seconds),
        mb_per_rank_and_step=mb[-1] / len(seconds),
        counted_by=first.counted_by,
        replicas_equal=len({o.digest for o in outcomes}) == 1,
        digest=first.digest,
        losses=[statistics.mean(step) for step in zip(*(o.losses for o in outcomes), strict=True)],
        seconds=seconds,
        mb=mb,
    )


def table(results: Sequence[Result], title: str) -> Table:
    """The table of the results."""
    figures = {"final loss": ".6f", "s / step": ".4f", "MB / rank / step": ">"}
    shown = Table({"method": ""} | figures | {"replicas equal": ""}, title, HEAVY_HEAD)
    for r in results:
        sent = f"{r.mb_per_rank_and_step:.3f} ({r.counted_by})"
        equal = f"yes, {r.digest[:8]}" if r.replicas_equal else "NO"
        shown.add(Text(r.name, "bold"), r.final_loss, r.seconds_per_step, sent, equal)
    return shown


def stored(of: Result) -> dict[str, Any]:
    """The row of demo.json, with short curves."""
    curves = {"losses": summaries.curve(of.losses), "seconds": summaries.curve(of.seconds)}
    return asdict(of) | curves | {"mb": [of.mb[end - 1] for end in summaries.ends(len(of.mb))]}


def save_plot(path: Path, title: str, results: Sequence[Result]) -> None:
    """Plots loss over seconds, loss over MB sent, and both costs of a step as bars."""
    panels = {
        "loss over time": lambda axes: _losses(axes, results, over_bytes=False),
        "loss over bytes": lambda axes: _losses(axes, results, over_bytes=True),
        "costs of a step": lambda axes: _bars(axes, results),
    }
    plots.save(path, panels, title, (4.5, 4), columns=3)


def _losses(axes: Axes, results: Sequence[Result], over_bytes: bool) -> None:
    for i, r in enumerate(results):
        # Dense rows have equal losses, so later rows are thinner to keep all of them visible.
        style: Any = {
            "color": COLORS[i % len(COLORS)],
            "lw": max(1.2, 4.5 - 2.5 * i),
            "label": r.name,
        }
        cost = r.mb if over_bytes else list(itertools.accumulate(r.seconds))
        axes.plot(cost, _smooth(r), **style)
    axes.set(ylabel="training loss (nats per character)")
    axes.set(xlabel="MB sent by each rank" if over_bytes else "seconds")
    axes.grid(alpha=0.25)
    if over_bytes:
        axes.set_xscale("log")
    else:
        axes.legend(frameon=False)


def _smooth(of: Result) -> list[float]:
    """The running mean of the last SMOOTHED_STEPS losses."""
    starts = (max(0, end - SMOOTHED_STEPS) for end in range(1, len(of.losses) + 1))
    return [statistics.mean(of.losses[start : end + 1]) for end, start in enumerate(starts)]


def _bars(seconds: Axes, results: Sequence[Result]) -> None:
    """Seconds per step at the left of each pair (left axis), MB per step at the right."""
    megabytes = seconds.twinx()
    megabytes.spines["top"].set_visible(False)
    places = range(len(results))
    upright: Any = {"fontsize": 7, "rotation": 90, "padding": 3}  # not wider than a bar
    style: Any = {"width": 0.36, "color": [COLORS[i % len(COLORS)] for i in places]}
    times, sizes = [r.seconds_per_step for r in results], [r.mb_per_rank_and_step for r in results]
    drawn = seconds.bar([i - 0.2 for i in places], times, **style)
    seconds.bar_label(drawn, fmt="%.3f s", **upright)
    drawn = megabytes.bar([i + 0.2 for i in places], sizes, **style, alpha=0.45, hatch="//")
    megabytes.bar_label(drawn, fmt="%.3g MB", **upright)
    seconds.set_xticks(places, [r.name.replace(" ", "\n", 1) for r in results], fontsize=7)
    seconds.set_ylabel("seconds per step (solid)")
    megabytes.set_ylabel("MB sent per rank and step (hatched)")
    seconds.margins(y=0.2)
    megabytes.margins(y=0.2)
