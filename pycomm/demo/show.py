"""The output of the demo: a progress bar of each row, the table and a sample of the text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text

from pycomm._tables import console
from pycomm.bench.support import machine, netns, processes, summaries
from pycomm.demo import report, training
from pycomm.demo.rows import Row

WIDEST = 100  # characters of the sample


def show(rows: Sequence[Row], settings: training.Settings, size: int, out: Path) -> int:
    """Trains `rows` in turn on `size` processes, prints and stores the results. Returns the exit
    status: 1 if replicas differ."""
    to = console()
    out.mkdir(parents=True, exist_ok=True)
    if busy := machine.busy():
        to.print(f"warning: {busy}", style="yellow")
    outcomes = _train(to, rows, settings, size)
    link = f"; one host per rank, links of {settings.link_rate}" if settings.link_rate else ""
    heading = f"the same training with each method{link}"
    results = [report.result(row, outcomes[row.key]) for row in rows]
    to.print(report.table(results, heading))
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
    json, plot = out / "demo.json", out / "demo.png"
    summaries.store(json, settings=given, rows=[report.stored(one) for one in results])
    report.save_plot(plot, heading, results)
    to.print(f"{json}  {plot}")
    return 0 if all(r.replicas_equal for r in results) else 1


def _train(
    to: Console, rows: Sequence[Row], settings: training.Settings, size: int
) -> dict[str, list[training.Outcome]]:
    """Trains the rows and shows their progress; returns the outcomes of each in rank order."""
    outcomes: dict[int, dict[str, training.Outcome]] = {rank: {} for rank in range(size)}
    bars = Progress(
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=to,
        disable=not to.is_terminal,
    )
    tasks = {
        row.key: bars.add_task(row.name, total=settings.steps, loss=float("nan")) for row in rows
    }
    names = {row.key: row.name for row in rows}
    line_every = max(1, settings.steps // 5)

    def on_message(rank: int, message: training.Progress | training.Outcome) -> None:
        if isinstance(message, training.Outcome):
            outcomes[rank][message.key] = message
            return
        bars.update(tasks[message.key], completed=message.step, loss=message.loss)
        if not to.is_terminal and message.step % line_every == 0:
            step = f"step {message.step} of {settings.steps}, loss {message.loss:.3f}"
            to.print(f"{names[message.key]}: {step}")

    with bars, netns.behind(settings.link_rate, size) as hosts:
        keys = list(tasks)
        processes.run(training.train, (keys, settings), size, on_message, hosts)
    return {key: [outcomes[rank][key] for rank in range(size)] for key in keys}
