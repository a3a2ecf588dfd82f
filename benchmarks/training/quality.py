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
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes

from benchmarks.support import command
from benchmarks.training.convergence import Run
from pycomm.bench.support import machine, plots, summaries

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


def main(argv: Sequence[str]) -> int:
    """Combines, prints, stores; returns 1 if no run of a method reaches the loss."""
    parser = command.parser("quality", __doc__, plot="the loss over the time")
    stored: dict[str, Any] = {"type": Path, "required": True}
    parser.add_argument("--convergence", nargs="+", **stored, help="its stored results")
    parser.add_argument("--links", **stored, help="stored results of links --training")
    options = parser.parse_args(argv)
    runs = [Run(**row) for path in options.convergence for row in summaries.read(path)["rows"]]
    links = summaries.read(options.links)
    there = {run.method for run in runs}
    chosen = {method: shortest(runs, method) for method in WAYS if method in there}
    if absent := [method for method, found in chosen.items() if not found]:
        command.CONSOLE.print(f"no run reaches the loss of {REFERENCE}: {', '.join(absent)}")
        return 1
    rows = combined(chosen, links["rows"])
    settings = {name: links["settings"][name] for name in ("hosts", "elements")}
    command.report(options.json, settings={"ranks": runs[0].ranks} | settings, rows=rows)
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


def combined(chosen: dict[str, list[Run]], steps: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """A row for each link and method."""
    step_s = {(row["rate"], row["way"]): row["step_s"] for row in steps}
    known = {run.seed: run for run in chosen[REFERENCE]}
    rows = []
    for rate in dict.fromkeys(row["rate"] for row in steps):
        dense_s = chosen[REFERENCE][0].steps * step_s[rate, WAYS[REFERENCE]]
        for method, runs in chosen.items():
            one_s, count = step_s[rate, WAYS[method]], runs[0].steps
            rows.append(
                {
                    "rate": rate,
                    "method": method,
                    "step_s": one_s,
                    "steps": count,  # until the loss of the reference
                    "loss": _loss(runs),  # nats, a mean over the seeds
                    "reference_loss": _loss([known[run.seed] for run in runs]),
                    "seconds": count * one_s,
                    "ratio": dense_s / (count * one_s),  # times less than the reference
                }
            )
    return rows


def _loss(runs: Sequence[Run]) -> float:
    return statistics.mean(run.score for run in runs)


def draw(path: Path, rows: Sequence[dict[str, Any]], chosen: dict[str, list[Run]]) -> None:
    """Training loss over time, a panel for each link; the first seed of the methods in DRAWN."""

    def panel(own: Sequence[dict[str, Any]], axes: Axes) -> None:
        for row in own:
            losses = chosen[row["method"]][0].losses
            minutes = [
                row["seconds"] / 60 * (part + 1) / len(losses) for part in range(len(losses))
            ]
            axes.plot(minutes, losses, lw=1.5, label=f"{row['method']}, {row['steps']} steps")
            axes.plot(minutes[-1], losses[-1], "o", ms=4, color=axes.lines[-1].get_color())
        axes.set(xlabel="minutes", xlim=(0, None), ylabel="training loss (nats)")
        axes.legend(frameon=False, fontsize=8)

    drawn = [row for row in rows if row["method"] in DRAWN]
    panels = plots.grouped(drawn, lambda row: f"link of {row['rate']}", panel)
    plots.save(path, panels, machine.caption(), (4.2, 3.8), columns=len(panels))
