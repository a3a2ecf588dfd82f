"""`python -m benchmarks training`: a step of data-parallel training with each backend.

Every rank holds each model once for every backend, in torch's DistributedDataParallel, once in
pycomm.DataParallel (`wrapper`), and there with DGC at 99.9 % (`dgc`) and with fused=True (`fused`);
all take their turns in one run, step by step the same work. `fake` communicates nothing: no backend
can be faster. `alone` is one rank without DistributedDataParallel while the others rest. With
--rates every rank is on a host of its own (pycomm.bench.support.netns), behind a link of each of
those rates in turn; needs root. The last table shows seconds per step, rate by rate.

    efficiency = samples per second of N ranks / (N * samples per second of one alone)
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from matplotlib.axes import Axes
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import pycomm
from benchmarks.support import command
from benchmarks.support.command import UNSHAPED
from benchmarks.training.models import TASKS, Task
from pycomm._tables import Table
from pycomm.bench.collectives import table, worker
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.peers import OURS, PEERS
from pycomm.bench.support import machine, netns, plots, processes, summaries

BACKENDS = ("gloo", "pycomm", "fake")
ALONE = "alone"
Step = Callable[[], None]


def _compressed(model: nn.Module, optimizer: torch.optim.Optimizer, fused: bool) -> nn.Module:
    dgc = pycomm.DGC(optimizer, sparsity=[0.999], fused=fused)
    return pycomm.DataParallel(model, compression=dgc)


OWN: dict[str, Callable[[nn.Module, torch.optim.Optimizer], nn.Module]] = {
    "wrapper": lambda model, _: pycomm.DataParallel(model),
    "dgc": functools.partial(_compressed, fused=False),
    "fused": functools.partial(_compressed, fused=True),
}
CONTESTANTS = (*BACKENDS[:2], *OWN, *BACKENDS[2:])


@dataclass(frozen=True)
class RankTimes:
    """The report of every rank after each model: seconds of single steps, by backend and round."""

    task: str
    samples: int  # of one rank and step
    seconds: dict[str, list[list[float]]]


@dataclass(frozen=True)
class Row:
    """One backend on one model; the time is the slowest rank's median."""

    rate: str  # of the hosts' lines, or "": one host
    model: str
    backend: str  # or one of OWN, or ALONE
    step_ms: float
    samples_per_second: float  # of all ranks together
    ratio: float  # times faster than gloo
    of_fake_percent: float  # of the speed that a backend without communication has
    efficiency_percent: float


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    counts = {"rounds": (7, "turns of each contestant"), "steps": (10, "of each turn")}
    parser = command.parser("training", __doc__, "samples per second", ranks=(2, ""), **counts)
    command.add_names(parser, "models", TASKS, TASKS)
    limited = '"1gbit,10gbit": a host for each rank, behind such links'
    parser.add_argument("--rates", type=command.rates, help=limited)
    options = parser.parse_args(argv)
    if not options.models or min(options.ranks - 1, options.rounds, options.steps) < 1:
        parser.error("at least 1 model, 2 ranks, 1 round and 1 step are needed")
    if options.rates and UNSHAPED in options.rates:
        parser.error(f"--rates {UNSHAPED}: without --rates no link is limited")
    if options.rates and (why := netns.missing()):
        parser.error(f"--rates {why}")
    found = [row for rate in options.rates or [""] for row in _measure(rate, options)]
    if options.rates:
        command.CONSOLE.print(by_rate(found))
    settings = command.chosen(options, "ranks", "rounds", "steps")
    settings["rates"] = options.rates and ",".join(options.rates)
    summaries.store(options.json, settings=settings, rows=[asdict(row) for row in found])
    if options.plot:
        draw(options.plot, found, f"{options.ranks} ranks, {machine.caption()}")
    return 0


COLUMNS = {"# model": "<8", "backend": ">8", "step (ms)": "10.2f", "samples/s": "10.1f"}
COLUMNS |= {"vs gloo": ">8", "% of fake": ".1f", "efficiency %": ".1f"}


def add(to: Table, row: Row) -> None:
    """Adds a row to a table of COLUMNS."""
    shares = f"{row.ratio:.2f}x", row.of_fake_percent, row.efficiency_percent
    to.add(row.model, row.backend, row.step_ms, row.samples_per_second, *shares)


def by_rate(found: Sequence[Row]) -> Table:
    """Seconds per step: a line for each model and rate, a column for each backend."""
    shown = Table({"# s/step": "", "rate": ">"} | dict.fromkeys(CONTESTANTS, "8.4f"))
    for model, rate in dict.fromkeys((row.model, row.rate) for row in found):
        took = {r.backend: r.step_ms / 1e3 for r in found if (r.model, r.rate) == (model, rate)}
        shown.add(model, rate, *(took[name] for name in CONTESTANTS))
    return shown


def rows(rate: str, by_rank: Sequence[RankTimes]) -> list[Row]:
    """The rows of one model, from the reports of all ranks."""
    first, size = by_rank[0], len(by_rank)
    slowest = {
        name: max(table.typical(one.seconds[name]) for one in by_rank if name in one.seconds)
        for name in first.seconds
    }
    return [
        Row(
            rate=rate,
            model=first.task,
            backend=name,
            step_ms=seconds * 1e3,
            samples_per_second=(1 if name == ALONE else size) * first.samples / seconds,
            ratio=slowest["gloo"] / seconds,
            of_fake_percent=100 * slowest["fake"] / seconds,
            efficiency_percent=100 * slowest[ALONE] / seconds,
        )
        for name, seconds in slowest.items()
    ]


def draw(path: Path, found: Sequence[Row], caption: str) -> None:
    """Bars of samples per second, a panel for each model and rate."""
    parallel = [row for row in found if row.backend != ALONE]
    panels = plots.grouped(
        parallel, lambda row: f"{row.model} {row.rate}, samples per second", _panel
    )
    ours = [row.ratio for row in parallel if row.backend == "wrapper"]
    title = "samples per second under DistributedDataParallel"
    if ours:
        title = (
            f"pycomm.DataParallel trains {min(ours):.2f} to {max(ours):.2f} times as fast as gloo"
        )
    plots.save(path, panels, title, caption, 1.8)


def _panel(own: Sequence[Row], axes: Axes) -> None:
    heights = {row.backend: row.samples_per_second for row in own}
    plots.bars(axes, heights, [f"{row.ratio:.2f}x" for row in own])


def _measure(rate: str, options: argparse.Namespace) -> list[Row]:
    found: list[Row] = []
    shown = Table(COLUMNS, rate)
    with command.bar() as bar:
        task = bar.add_task("training", total=len(options.models))

        def show(by_rank: list[RankTimes]) -> None:
            new = rows(rate, by_rank)
            found.extend(new)
            for row in new:
                add(shown, row)
            shown.flush(command.CONSOLE)
            bar.advance(task)

        on_message = command.by_case(options.ranks, show)
        args = (options.models, options.rounds, options.steps)
        with netns.behind(rate, options.ranks) as hosts:
            processes.run(work, args, options.ranks, on_message, hosts)
    return found


def work(rank: processes.Rank, names: list[str], rounds: int, steps: int) -> None:
    """A rank: reports one RankTimes for each model."""
    groups = Groups(
        [OURS["pycomm"], PEERS["gloo"], PEERS["fake"]], rank.store, rank.rank, rank.size
    )
    for name in names:
        task = TASKS[name]
        torch.manual_seed(rank.rank)
        contestants = {backend: step_of(task, groups.of(backend)) for backend in BACKENDS}
        contestants |= {name: step_of(task, None, wrap=wrap) for name, wrap in OWN.items()}
        seconds: dict[str, list[list[float]]] = {name: [] for name in CONTESTANTS}
        if rank.rank == 0:
            contestants[ALONE] = step_of(task, None, alone=True)
            seconds[ALONE] = []
        for turn, who in enumerate(worker.turns(CONTESTANTS, rounds), 1):
            dist.barrier()
            seconds[who].append(_series(contestants[who], steps))
            if turn % len(CONTESTANTS) == 0:
                dist.barrier()
                if rank.rank == 0:
                    seconds[ALONE].append(_series(contestants[ALONE], steps))
        dist.barrier()
        rank.send(RankTimes(name, len(task.batch()[0]), seconds))


def step_of(
    task: Task,
    group: dist.ProcessGroup | None,
    alone: bool = False,
    wrap: Callable[[nn.Module, torch.optim.Optimizer], nn.Module] | None = None,
) -> Step:
    """One step of training a new model, `alone`, in `wrap` or in DistributedDataParallel."""
    model = task.model()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    wrapped: nn.Module = model
    if wrap is not None:
        wrapped = wrap(model, optimizer)
    elif not alone:
        wrapped = DistributedDataParallel(model, process_group=group)
        if dist.get_backend(group) == "fake":  # its calls give no result to wait for
            wrapped.register_comm_hook(None, noop_hook)
    x, y = task.batch()

    def step() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(wrapped(x), y)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's own
        optimizer.step()

    return step


def _series(step: Step, steps: int) -> list[float]:
    """Seconds of each of `steps` steps after two that warm up."""
    seconds = []
    for _ in range(steps + 2):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return seconds[2:]
