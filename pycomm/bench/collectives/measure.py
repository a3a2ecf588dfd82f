"""A run of `pycomm bench collectives`: starts the ranks, and prints what they report."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from pycomm.bench.collectives import mpi, table, worker
from pycomm.bench.collectives.cases import Case, Run
from pycomm.bench.support import machine, processes
from pycomm.bench.support.sizes import format_size

OWN_LOAD = 0.5  # of this process, beside its ranks


def measure(to: Console, run: Run) -> list[table.Line]:
    """Measures all cases; prints the machine, the settings and the tables."""
    there = machine.describe()
    calls = run.calls or "2 to 100, by size"
    to.print(
        f"# {run.ranks} ranks on {there['cpu']}, {there['cores']} processors, {run.device}; "
        f"{there['kernel']}, Python {there['python']}, torch {there['torch']}, {there['date']}\n"
        f"# warmup iters: {run.warm_up} iters: {calls} rounds: {run.rounds} "
        f"validate: {int(run.check)} busy: {int(run.busy)}",
        soft_wrap=True,
    )
    found: list[table.Line] = []
    for name in run.mpis or [""]:
        found += _measure(to, run, name)
    to.print("\n".join(table.foot(found, run.check)), soft_wrap=True)
    return found


def _measure(to: Console, run: Run, name: str) -> list[table.Line]:
    """Runs all cases on fresh processes; prints the lines of each as soon as all ranks have it.

    The mpiexec of the MPI `name` starts the processes, if it is not "".
    """
    peers = run.beside(name)
    found: list[table.Line] = []
    others: list[table.Line] = []  # of the case before, which has the other form
    waiting: dict[Case, dict[int, worker.Times]] = {}
    bar = Progress(console=to, disable=not to.is_terminal, transient=True)
    task = bar.add_task("starting", total=len(run.cases))

    def on_message(rank: int, times: worker.Times) -> None:
        by_rank = waiting.setdefault(times.case, {})
        by_rank[rank] = times
        if len(by_rank) < run.ranks:
            return
        case, new = times.case, table.lines([by_rank[r] for r in range(run.ranks)])
        bar.update(task, advance=1, description=f"{case.verb} {format_size(case.bytes)}")
        if case.copies:
            others[:] = new
            return
        new = table.merged(
            new, others, mpi=name, loaded=os.getloadavg()[0] > (os.cpu_count() or 1) + OWN_LOAD
        )
        others.clear()
        shown = []
        if not found or (found[-1].verb, found[-1].dtype) != (case.verb, case.dtype):
            shown = [f"# {case.verb} {case.dtype}", *table.head([peer.name for peer in peers])]
        found.extend(new)
        shown += [table.row(line, run.check) for line in new]
        shown += [
            f"# {peer} refuses {case.verb} {case.dtype}: {why}"
            for peer, why in times.refused.items()
        ]
        to.print("\n".join(shown), soft_wrap=True)

    with bar, worker.barrier_file(run.ranks) as flags:
        args = (flags, peers, run)
        if name:
            mpi.run((name, run.prefixes.get(name)), worker.work, args, run.ranks, on_message)
        else:
            processes.run(worker.work, args, run.ranks, on_message)
    return found


def draw(path: Path, found: Sequence[table.Line], ranks: int, caption: str) -> None:
    """Bandwidth over size, a panel for each verb and dtype, with the limit."""
    from pycomm.bench.support import plots  # imports matplotlib, which may be missing

    bounded = [line for line in found if line.limit_us]

    def panel(chosen: Sequence[table.Line], axes: Any) -> None:
        limits = {line.size_bytes: line.size_bytes / line.limit_us / 1e3 for line in chosen}
        axes.plot(list(limits), list(limits.values()), label="memory limit", **plots.LIMIT)
        shown = (4**i for i in range(1, 20, 2))
        plots.byte_ticks(axes, [size for size in shown if min(limits) <= size <= max(limits)])
        axes.set_yscale("log")
        plots.lines(
            axes,
            [line for line in chosen if line.peer != "fake"],
            ("peer", "size_bytes", "algbw_gbs"),
            ylabel="GB/s",
        )

    drawn = {(line.verb, line.dtype, line.size_bytes, line.peer): line for line in reversed(found)}
    ratios = [line.ratio for line in drawn.values() if line.peer == "pycomm" and line.ratio]
    title = f"{', '.join({line.verb: 0 for line in found})} of {ranks} ranks"
    if ratios and "gloo" in {line.peer for line in found}:
        title += f": pycomm takes {min(ratios):.3g} to {max(ratios):,.0f} times less time than gloo"
    panels = plots.grouped(bounded, lambda line: f"{line.verb}, {line.dtype}", panel)
    plots.save(path, panels, title, f"{ranks} ranks, {caption}", 3.6)
