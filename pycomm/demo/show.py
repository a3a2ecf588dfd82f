"""The output of the demo: a progress bar of each row, the table and a sample of the text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.text import Text
from torch.multiprocessing.spawn import ProcessException

from pycomm.bench.support import machine, netns, processes
from pycomm.demo import report, training
from pycomm.demo.rows import Row


def show(rows: Sequence[Row], settings: training.Settings, size: int, out: Path) -> int:
    """Trains `rows` in turn on `size` processes, prints and stores the results.

    Returns:
        The exit code: 0 if all replicas are equal, 1 after a failure, 130 after Ctrl-C.
    """
    console = Console()
    out.mkdir(parents=True, exist_ok=True)
    if busy := machine.busy():
        console.print(f"warning: {busy}", style="yellow", soft_wrap=True, markup=False)
    try:
        outcomes = _train(console, rows, settings, size)
    except ProcessException as error:  # of a rank
        console.print(f"a rank failed\n{error}", style="red", markup=False)
        return 1
    except KeyboardInterrupt:  # Ctrl-C
        console.print("interrupted")
        return 130
    results = [report.result(row, outcomes[row.key]) for row in rows]
    console.print(report.table(results, settings))
    first = results[0]
    for r in results[1:]:
        console.print(
            f"{r.name}: {first.seconds_per_step / r.seconds_per_step:.2f} times as fast as "
            f"{first.name}; final loss differs by {abs(r.final_loss - first.final_loss):.1e}",
            highlight=False,
        )
    sample = Text(outcomes[rows[-1].key][0].sample)
    console.print(Panel(sample, title="Python as the model writes it", title_align="left"))
    report.save_json(out / "demo.json", settings, size, results)
    report.save_plot(out / "demo.png", settings, results)
    console.print(f"{out / 'demo.json'}  {out / 'demo.png'}", highlight=False)
    return 0 if all(r.replicas_equal for r in results) else 1


def _train(
    console: Console, rows: Sequence[Row], settings: training.Settings, size: int
) -> dict[str, list[training.Outcome]]:
    """Trains the rows and shows their progress; returns the outcomes of each in rank order."""
    outcomes: dict[int, dict[str, training.Outcome]] = {rank: {} for rank in range(size)}
    bars = Progress(
        TextColumn("{task.description:16}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]:.3f}"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
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
        if not console.is_terminal and message.step % line_every == 0:
            console.print(
                f"{names[message.key]}: step {message.step} of {settings.steps}, "
                f"loss {message.loss:.3f}",
                highlight=False,
            )

    with bars, netns.behind(settings.link_rate, size) as hosts:
        keys = list(tasks)
        processes.run(training.train, (keys, settings), size, on_message, hosts)
    return {key: [outcomes[rank][key] for rank in range(size)] for key in keys}
