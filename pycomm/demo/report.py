"""Builds the table, demo.json and demo.png from the outcomes of the ranks."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.table import Table

from pycomm.bench.support import summaries
from pycomm.bench.support.machine import describe
from pycomm.demo.rows import Row
from pycomm.demo.training import Outcome, Settings

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


def table(results: Sequence[Result], settings: Settings) -> Table:
    """The table of the results."""
    shown = Table(title=_title(settings), title_justify="left")
    shown.add_column("method", style="bold")
    shown.add_column("final loss", justify="right")
    shown.add_column("s / step", justify="right")
    shown.add_column("MB / rank / step", justify="right")
    shown.add_column("replicas equal")
    for r in results:
        shown.add_row(
            r.name,
            f"{r.final_loss:.6f}",
            f"{r.seconds_per_step:.4f}",
            f"{r.mb_per_rank_and_step:.3f} ({r.counted_by})",
            f"yes, {r.digest[:8]}" if r.replicas_equal else "NO",
        )
    return shown


def save_json(path: Path, settings: Settings, processes: int, results: Sequence[Result]) -> None:
    """Writes the data of the table, short curves and a description of the machine."""
    content = {
        "machine": describe(),
        "settings": asdict(settings) | {"processes": processes},
        "rows": [asdict(r) | _curves(r) for r in results],
    }
    summaries.write(path, content)


def _curves(of: Result) -> dict[str, list[float]]:
    at = summaries.ends(len(of.mb))
    return {
        "losses": summaries.curve(of.losses),
        "seconds": summaries.curve(of.seconds),
        "mb": [of.mb[end - 1] for end in at],
    }


def _title(settings: Settings) -> str:
    link = f"; one host per rank, links of {settings.link_rate}" if settings.link_rate else ""
    return f"the same training with each method{link}"


def save_plot(path: Path, settings: Settings, results: Sequence[Result]) -> None:
    """Plots loss over seconds, loss over MB sent, and both costs of a step as bars."""
    figure = Figure(figsize=(13, 4), layout="constrained")
    figure.suptitle(_title(settings), fontsize=10)
    over_seconds, over_bytes, costs = figure.subplots(1, 3, width_ratios=(1, 1, 1.3))
    for i, r in enumerate(results):
        # Dense rows have equal losses, so later rows are thinner to keep all of them visible.
        style = {"color": COLORS[i % len(COLORS)], "lw": max(1.2, 4.5 - 2.5 * i), "label": r.name}
        losses = _smooth(r.losses)
        over_seconds.plot(list(itertools.accumulate(r.seconds)), losses, **style)
        over_bytes.plot(r.mb, losses, **style)
    over_seconds.set(xlabel="seconds", ylabel="training loss (nats per character)")
    over_bytes.set(xlabel="MB sent by each rank", ylabel="training loss (nats per character)")
    over_bytes.set_xscale("log")
    over_seconds.legend(frameon=False)
    _bars(costs, results)
    for axes in (over_seconds, over_bytes, costs):
        axes.spines[["top", "right"]].set_visible(False)
    for axes in (over_seconds, over_bytes):
        axes.grid(alpha=0.25)
    figure.savefig(path, dpi=150)


def _smooth(losses: Sequence[float]) -> list[float]:
    """The running mean of the last SMOOTHED_STEPS losses."""
    windows = (losses[max(0, i - SMOOTHED_STEPS + 1) : i + 1] for i in range(len(losses)))
    return [statistics.mean(window) for window in windows]


def _bars(seconds: Axes, results: Sequence[Result]) -> None:
    """Seconds per step at the left of each pair (left axis), MB per step at the right."""
    megabytes = seconds.twinx()
    megabytes.spines["top"].set_visible(False)
    upright: Any = {"fontsize": 7, "rotation": 90, "padding": 3}  # not wider than a bar
    for i, r in enumerate(results):
        color = COLORS[i % len(COLORS)]
        time_bar = seconds.bar(i - 0.2, r.seconds_per_step, 0.36, color=color)
        seconds.bar_label(time_bar, fmt="%.3f s", **upright)
        size_bar = megabytes.bar(
            i + 0.2, r.mb_per_rank_and_step, 0.36, color=color, alpha=0.45, hatch="//"
        )
        megabytes.bar_label(size_bar, fmt="%.3g MB", **upright)
    seconds.set_xticks(
        range(len(results)), [r.name.replace(" ", "\n", 1) for r in results], fontsize=8
    )
    seconds.set_ylabel("seconds per step (solid)")
    megabytes.set_ylabel("MB sent per rank and step (hatched)")
    seconds.margins(y=0.2)
    megabytes.margins(y=0.2)
