"""`python -m benchmarks quality`: the time to the loss that AdamW reaches without compression.

It combines the stored results of two benchmarks:

    convergence       how many steps a method needs, by runs of several lengths (--steps)
    links --training  how long a step takes, by the rate of the link

A method needs the steps of its shortest run that ends with the loss of `adamw` or a lower one, with
the same seed; one without runs has no row. The time is this number times the median step. The loss
is that of a small transformer, and the step that of a model with more parameters; the settings name
both. A step of Muon and SOAP is one of AdamW with the same exchange, without their own arithmetic.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from benchmarks.support import command
from benchmarks.training.convergence import Run
from pycomm.bench.support import summaries

REFERENCE = "adamw"
WORKLOAD = "text"
# By method of convergence: the way of links --training.
WAYS = {
    REFERENCE: "adamw",
    "adamw quantize 3 8": "quantize",
    "adamw quantize 3 3": "quantize_3_3",
    "adamw quantized updates 1 1": "quantized_updates",
    "adamw topk 32": "topk_32",
    "adamw topk 50": "topk_50",
    "adamw topk 200": "topk",
    "adamw topk 500": "topk_500",
    "muon": "adamw",
    "muon topk 50": "topk_50",
    "soap": "adamw",
    "soap topk 200": "topk",
    "soap topk 500": "topk_500",
}
DRAWN = [REFERENCE, "adamw quantize 3 8", "adamw topk 200", "soap topk 200"]


@dataclass(frozen=True)
class Row:
    """One method over one link."""

    rate: str
    method: str
    step_s: float
    steps: int  # until the loss of the reference
    loss: float  # nats, a mean over the seeds
    reference_loss: float  # of the same seeds
    seconds: float
    ratio: float  # times less than the reference


def main(argv: Sequence[str]) -> int:
    """Combines, prints, stores; returns 1 if no run of a method reaches the loss."""
    parser = command.parser("quality", __doc__, plot="the loss over the time")
    stored = "stored results of"
    parser.add_argument(
        "--convergence", type=Path, nargs="+", required=True, help=f"{stored} convergence"
    )
    parser.add_argument("--links", type=Path, required=True, help=f"{stored} links --training")
    options = parser.parse_args(argv)
    runs = [Run(**row) for path in options.convergence for row in summaries.read(path)["rows"]]
    links = summaries.read(options.links)
    there = {run.method for run in runs}
    chosen = {method: shortest(runs, method) for method in WAYS if method in there}
    if absent := [method for method, found in chosen.items() if not found]:
        command.CONSOLE.print(f"no run reaches the loss of {REFERENCE}: {', '.join(absent)}")
        return 1
    rows = combined(chosen, links["rows"])
    settings = {"ranks": runs[0].ranks, "hosts": links["settings"]["hosts"]}
    settings["elements"] = links["settings"]["elements"]
    command.report(options.json, settings=settings, rows=[asdict(row) for row in rows])
    if options.plot:
        draw(options.plot, rows, chosen)
    return 0


def shortest(runs: Sequence[Run], method: str) -> list[Run]:
    """The shortest runs of a method, one for each seed, whose mean loss is at most that of the
    reference with the same seeds; []: no run is good enough.
    """
    ours = [run for run in runs if run.workload == WORKLOAD and run.link_mbit is None]
    known = {run.seed: run for run in ours if run.method == REFERENCE}
    by_steps: dict[int, list[Run]] = {}
    for run in ours:
        if run.method == method and run.seed in known:
            by_steps.setdefault(run.steps, []).append(run)
    for _, found in sorted(by_steps.items()):
        if _loss(found) <= _loss([known[run.seed] for run in found]):
            return found
    return []


def combined(chosen: dict[str, list[Run]], steps: Sequence[dict[str, Any]]) -> list[Row]:
    """A row for each link and method."""
    step_s = {(row["rate"], row["way"]): row["step_s"] for row in steps}
    known = {run.seed: run for run in chosen[REFERENCE]}
    rows = []
    for rate in dict.fromkeys(row["rate"] for row in steps):
        dense_s = chosen[REFERENCE][0].steps * step_s[rate, WAYS[REFERENCE]]
        for method, runs in chosen.items():
            one_s = step_s[rate, WAYS[method]]
            seconds = runs[0].steps * one_s
            reference = _loss([known[run.seed] for run in runs])
            ratio = dense_s / seconds
            rows.append(
                Row(rate, method, one_s, runs[0].steps, _loss(runs), reference, seconds, ratio)
            )
    return rows


def _loss(runs: Sequence[Run]) -> float:
    return statistics.mean(run.score for run in runs)


def draw(path: Path, rows: Sequence[Row], chosen: dict[str, list[Run]]) -> None:
    """Training loss over time, a panel for each link; the first seed of the methods in DRAWN."""
    rates = list(dict.fromkeys(row.rate for row in rows))
    figure = Figure(figsize=(4.2 * len(rates), 3.8), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True).flat
    for axes, rate in zip(panels, rates, strict=True):
        for row in rows:
            if row.rate != rate or row.method not in DRAWN:
                continue
            run = chosen[row.method][0]
            parts = len(run.losses)
            minutes = [row.seconds / 60 * (part + 1) / parts for part in range(parts)]
            axes.plot(minutes, run.losses, lw=1.5, label=f"{row.method}, {row.steps} steps")
            axes.plot(minutes[-1], run.losses[-1], "o", ms=4, color=axes.lines[-1].get_color())
        axes.set(title=f"link of {rate}", xlabel="minutes", xlim=(0, None))
    figure.axes[0].set(ylabel="training loss (nats)")
    figure.axes[0].legend(frameon=False, fontsize=8)
    figure.savefig(path, dpi=150)
