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
from pycomm.bench.support import plots, summaries

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
# By method of convergence: its name in plots.
DRAWN = {
    REFERENCE: "AdamW",
    "adamw quantize 3 8": "Quantize(3, 8)",
    "adamw topk 200": "TopK(200)",
    "soap topk 200": "SOAP, TopK(200)",
}


def main(argv: Sequence[str]) -> int:
    """Combines, prints, stores; returns 1 if no run of a method reaches the loss."""
    parser = command.parser("quality", __doc__)
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


def draw(path: Path, rows: Sequence[dict[str, Any]], caption: str) -> None:
    """Minutes of the methods in DRAWN, a panel for each link."""

    def panel(own: Sequence[dict[str, Any]], axes: Axes) -> None:
        minutes = {DRAWN[row["method"]]: row["seconds"] / 60 for row in own}
        plots.bars(axes, minutes, [f"{value:.1f}" for value in minutes.values()])

    drawn = [row for row in rows if row["method"] in DRAWN]
    best = max(drawn, key=lambda row: row["ratio"])
    title = f"{DRAWN[best['method']]} reaches AdamW's loss in {best['ratio']:.1f} times less time "
    title += f"over {plots.rate(best['rate'])}"
    panels = plots.grouped(drawn, lambda row: f"{plots.rate(row['rate'])}, minutes", panel)
    plots.save(path, panels, title, caption, 1.7)


def draw_curves(
    path: Path, rows: Sequence[dict[str, Any]], chosen: dict[str, list[Run]], caption: str
) -> None:
    """Training loss over the minutes of each row's method; the first seed. The first row is the
    reference."""

    def panel(axes: Axes) -> None:
        for row in rows:
            name, minutes = DRAWN[row["method"]], row["seconds"] / 60
            losses = chosen[row["method"]][0].losses
            times = [minutes * (part + 1) / len(losses) for part in range(len(losses))]
            style = plots.style(name) | {"label": f"{name}: {minutes:.1f} minutes"}
            axes.plot(times, losses, lw=2, **style)
            axes.plot(minutes, losses[-1], "o", ms=5, color=style["color"])
        axes.set(xlabel="minutes", xlim=(0, None), ylabel="training loss (nats)")
        axes.grid()
        plots.label_lines(axes, below=True)

    reference, *_, last = rows
    title = f"{DRAWN[last['method']]} reaches the loss in {last['seconds'] / 60:.1f} instead of "
    title += f"{reference['seconds'] / 60:.1f} minutes over {plots.rate(last['rate'])}"
    plots.save(path, {"": panel}, title, caption, 3.0)
