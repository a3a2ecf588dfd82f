"""Trains the rows of the demo, and makes the table, demo.json and demo.svg from their outcomes."""

from __future__ import annotations

import argparse
import itertools
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from matplotlib.axes import Axes
from rich.box import HEAVY_HEAD
from rich.console import Console
from rich.panel import Panel
from rich.progress import Progress, TextColumn
from rich.text import Text

from pycomm._tables import Table, console
from pycomm.bench.support import machine, netns, plots, processes, summaries
from pycomm.demo import training
from pycomm.demo.rows import ROWS, Row
from pycomm.demo.training import Outcome

MB = 2**20
WIDEST = 100  # characters of the sample


@dataclass(frozen=True)
class Result:
    """A row of the table and of demo.json. Its lists are short curves (summaries.curve): mean
    losses and MB of the ranks, and the maximum of their seconds of a step."""

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


def run(options: argparse.Namespace) -> int:
    """Trains rows in turn, prints and stores the results. Returns the exit status: 1 if replicas
    differ."""
    rows, size, out = [ROWS[key] for key in options.rows], options.processes, options.out
    settings, to = training.Settings(options.steps, link_rate=options.rate), console()
    out.mkdir(parents=True, exist_ok=True)
    if busy := machine.busy():
        to.print(f"warning: {busy}", style="yellow")
    outcomes = _train(to, rows, settings, size)
    link = f"; one host per rank, links of {settings.link_rate}" if settings.link_rate else ""
    heading = f"the same training with each method{link}"
    results = [result(row, outcomes[row.key]) for row in rows]
    to.print(table(results, heading))
    first = results[0]
    for r in results[1:]:
        to.print(
            f"{r.name}: {first.seconds_per_step / r.seconds_per_step:.2f} times as fast as "
            f"{first.name}; final loss differs by {abs(r.final_loss - first.final_loss):.1e}"
        )
    sample = Text(outcomes[rows[-1].key][0].sample)
    title, width = "Python as the model writes it", min(to.width, WIDEST)
    to.print(Panel(sample, title=title, title_align="left", width=width))
    given = asdict(settings) | {"processes": size}
    json, plot = out / "demo.json", out / "demo.svg"
    summaries.store(json, settings=given, rows=[asdict(one) for one in results])
    save_plot(plot, results, settings.steps, f"{heading}, {machine.caption()}")
    to.print(f"{json}  {plot}")
    return 0 if all(r.replicas_equal for r in results) else 1


def _train(
    to: Console, rows: Sequence[Row], settings: training.Settings, size: int
) -> dict[str, list[Outcome]]:
    """Trains the rows and shows their progress; returns the outcomes of each in rank order."""
    outcomes: dict[str, dict[int, Outcome]] = {row.key: {} for row in rows}
    columns = *Progress.get_default_columns(), TextColumn("loss {task.fields[loss]:.3f}")
    bars = Progress(*columns, console=to, disable=not to.is_terminal)
    tasks = {row.key: bars.add_task(row.name, total=settings.steps, loss=0.0) for row in rows}
    names = {row.key: row.name for row in rows}
    line_every = max(1, settings.steps // 5)

    def on_message(rank: int, message: Outcome | tuple[str, int, float]) -> None:
        if isinstance(message, Outcome):
            outcomes[message.key][rank] = message
            return
        key, step, loss = message
        bars.update(tasks[key], completed=step, loss=loss)
        if not to.is_terminal and step % line_every == 0:
            to.print(f"{names[key]}: step {step} of {settings.steps}, loss {loss:.3f}")

    with bars, netns.behind(settings.link_rate, size) as hosts:
        processes.run(training.train, (list(tasks), settings), size, on_message, hosts)
    return {key: [of[rank] for rank in range(size)] for key, of in outcomes.items()}


def result(row: Row, outcomes: Sequence[Outcome]) -> Result:
    """Combines the outcomes of the ranks of `row`, in rank order."""
    losses, seconds, sent = (
        list(zip(*(getattr(o, name) for o in outcomes), strict=True))
        for name in ("losses", "seconds", "sent")
    )
    slowest = list(map(max, seconds))
    mb = [statistics.mean(step) / MB for step in sent]
    first = outcomes[0]
    return Result(
        key=row.key,
        name=row.name,
        parameters=first.parameters,
        final_loss=first.final_loss,
        seconds_per_step=statistics.mean(slowest),
        mb_per_rank_and_step=mb[-1] / len(mb),
        counted_by=first.counted_by,
        replicas_equal=len({o.digest for o in outcomes}) == 1,
        digest=first.digest,
        losses=summaries.curve(list(map(statistics.mean, losses))),
        seconds=summaries.curve(slowest),
        mb=[mb[end - 1] for end in summaries.ends(len(mb))],
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


def save_plot(path: Path, results: Sequence[Result], steps: int, caption: str) -> None:
    """Plots loss over seconds, loss over MB sent, and both costs of a step."""
    each = steps / len(results[0].seconds)  # steps of a point

    def losses(axes: Axes, over_bytes: bool) -> None:
        for i, r in enumerate(results):
            cost = r.mb if over_bytes else [s * each for s in itertools.accumulate(r.seconds)]
            # Dense rows have equal losses, so later rows are thinner to keep all of them visible.
            axes.plot(cost, r.losses, lw=max(1.2, 4.5 - 2.5 * i), **plots.style(r.name))
        scale, what = ("log", "MB sent by each rank") if over_bytes else ("linear", "seconds")
        axes.set(xscale=scale, xlabel=what, ylabel="nats per character")
        axes.grid()
        plots.label_lines(axes, below=over_bytes)

    def costs(axes: Axes) -> None:
        sent = {r.name: r.mb_per_rank_and_step for r in results}
        labels = [f"{r.mb_per_rank_and_step:.3g} MB, {r.seconds_per_step:.3f} s" for r in results]
        plots.bars(axes, sent, labels)

    panels = {
        "training loss over time": lambda axes: losses(axes, over_bytes=False),
        "training loss over bytes": lambda axes: losses(axes, over_bytes=True),
        "a step": costs,
    }
    first, best = results[0], min(results, key=lambda r: r.mb_per_rank_and_step)
    fewer = first.mb_per_rank_and_step / max(best.mb_per_rank_and_step, 1e-9)
    title = f"{best.name} sends {fewer:.3g} times fewer bytes than {first.name}, with a "
    title += f"loss of {best.final_loss:.2f}"
    plots.save(path, panels, title, caption, 2.3)
