"""`pycomm bench collectives`: pycomm's collectives and other libraries', in one run.

Two worker processes (or --ranks of them) hold a process group of every contestant. Each case is
checked against the exact answer; then the contestants are timed in turn, round by round, together
with the copy that gives the limit. Exits with 1 if an answer was wrong or a contestant was faster
than the limit.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from pycomm import _command_line
from pycomm._tables import console
from pycomm.bench.collectives import mpi, table, worker
from pycomm.bench.collectives.peers import OPERATORS, OURS, PEERS, Peer, operators
from pycomm.bench.collectives.verbs import DTYPES, VERBS, Case
from pycomm.bench.support import machine, packages, processes, summaries
from pycomm.bench.support.sizes import format_size, names, parse_sizes


@dataclass(frozen=True)
class Run:
    """The requested run."""

    ranks: int
    cases: list[Case]
    peers: list[Peer]
    rounds: int
    busy: bool = False  # a thread of each rank computes in Python meanwhile
    device: str = "cpu"
    prefixes: dict[str, Path] = field(default_factory=dict)  # of MPIs outside this environment

    @property
    def mpis(self) -> list[str]:
        """The MPIs among the peers."""
        return [peer.name for peer in self.peers if peer.name in mpi.PACKAGES]

    def beside(self, name: str) -> list[Peer]:
        """The contestants of the run with the MPI `name`; "": with none."""
        return [peer for peer in self.peers if peer.name == name or peer.name not in mpi.PACKAGES]


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(argv)
    peers = [OURS[name] for name in options.ours] + [PEERS[name] for name in options.peers]
    if not peers or options.ranks < 2 or options.rounds < 1:
        parser.error("nothing to measure: at least one contestant, 2 ranks and 1 round are needed")
    if options.plot and (why := packages.missing("matplotlib")):
        parser.error(f"--plot {why}")
    if why := _unsupported(options):
        parser.error(why)
    prefixes = dict(options.mpi_prefix)
    if why := _absent(options.peers, prefixes):
        parser.error(why)
    cases = [
        Case(verb, dtype, size, options.ranks)
        for verb in options.ops
        for dtype in options.dtypes
        for size in options.sizes
    ]
    run = Run(
        options.ranks,
        list(dict.fromkeys(cases)),
        peers,
        options.rounds,
        options.busy,
        options.device,
        prefixes,
    )
    to = console()
    found: list[table.Line] = []
    for name in run.mpis or [""]:
        found += _measure(to, run, name)
    given = {name: getattr(run, name) for name in ("ranks", "rounds", "busy", "device")}
    settings = given | {"peers": [peer.name for peer in peers]}
    summaries.store(options.json, settings=settings, rows=[asdict(line) for line in found])
    if options.plot:
        draw(options.plot, found, run.ranks, machine.caption())
    faults = table.faults(found, run.busy)
    for message in faults:
        to.print(message, style="red")
    return 1 if faults else 0


def _unsupported(options: argparse.Namespace) -> str:
    """The part of the request that the device does not support, or ""."""
    if options.idle is not None:
        return "--idle: use `python -m benchmarks bursts --idle S` in pycomm's repository"
    if options.device == "cpu":
        return "nccl takes arrays on devices: --device cuda" if "nccl" in options.peers else ""
    hosts = [name for name in options.peers if name not in ("nccl", "fake")]
    if hosts:
        return f"{' and '.join(hosts)}: here for arrays in host memory; --peers nccl"
    if options.ranks > torch.cuda.device_count():
        return (
            f"{options.ranks} ranks need as many GPUs, and torch finds {torch.cuda.device_count()}"
        )
    return ""


def _absent(names: Sequence[str], prefixes: Mapping[str, Path]) -> str:
    """The first of the peers `names` that is not installed, with the remedy, or ""."""
    reasons = [mpi.missing(name, prefixes.get(name)) for name in names if name in mpi.PACKAGES]
    for name in (name for name in names if name in OPERATORS):
        found = operators()
        reasons.append(found.missing(name) if found else f"{name} needs pycomm's repository")
    return next(filter(None, reasons), "")


def _parser() -> argparse.ArgumentParser:
    parser = _command_line.parser("bench collectives", __doc__, "bandwidth over size")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument(
        "--sizes", type=parse_sizes, default="4:64M", help="first:last[:factor], list (%(default)s)"
    )
    parser.add_argument("--ops", type=names(VERBS), default="all_reduce", help=",".join(VERBS))
    parser.add_argument("--dtypes", type=names(DTYPES), default="float32", help=",".join(DTYPES))
    parser.add_argument("--peers", type=names(PEERS), default="gloo", help=",".join(PEERS))
    parser.add_argument(
        "--mpi-prefix",
        type=_prefix,
        action="append",
        default=[],
        metavar="MPI=DIR",
        help="folder of an MPI outside this environment (pip install --prefix DIR); each MPI has a "
        "run of its own, with all other contestants",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cpu", help="device of the arrays"
    )
    parser.add_argument(
        "--ours",
        type=names(OURS),
        default=",".join(OURS),
        help="pycomm through torch.distributed, called directly, and on arrays of pycomm.empty "
        "(%(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=7, help="turns of each contestant")
    parser.add_argument(
        "--busy",
        action="store_true",
        help="beside each rank, a thread of its process computes in Python all the time",
    )
    parser.add_argument("--idle", help=argparse.SUPPRESS)  # refused, with its replacement
    return parser


def _prefix(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if name not in mpi.PACKAGES or not folder:
        known = ", ".join(mpi.PACKAGES)
        raise argparse.ArgumentTypeError(f"got {text!r}, expected MPI=DIR with one of {known}")
    return name, Path(folder).absolute()


def _measure(to: Console, run: Run, name: str) -> list[table.Line]:
    """Runs all cases on fresh processes; prints the lines of each as soon as all ranks have it.

    The mpiexec of the MPI `name` starts the processes, if it is not "".
    """
    peers = run.beside(name)
    found: list[table.Line] = []
    waiting: dict[Case, dict[int, worker.Times]] = {}
    bar = Progress(
        TextColumn("{task.description:24}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=to,
        disable=not to.is_terminal,
        transient=True,
    )
    shown = table.new([])
    task = bar.add_task("starting", total=len(run.cases))

    def on_message(rank: int, times: worker.Times) -> None:
        nonlocal shown
        by_rank = waiting.setdefault(times.case, {})
        by_rank[rank] = times
        if len(by_rank) < run.ranks:
            return
        new = [
            replace(line, mpi=name) for line in table.lines([by_rank[r] for r in range(run.ranks)])
        ]
        if not found or (found[-1].verb, found[-1].dtype) != (times.case.verb, times.case.dtype):
            to.print(f"# {times.case.verb} {times.case.dtype}")
            shown = table.new([peer.name for peer in peers])
        found.extend(new)
        for line in new:
            table.add(shown, line)
        shown.flush(to)
        for peer, why in times.refused.items():
            to.print(f"# {peer} refuses {times.case.verb} {times.case.dtype}: {why}")
        bar.update(
            task, advance=1, description=f"{times.case.verb} {format_size(times.case.bytes)}"
        )

    with bar, tempfile.NamedTemporaryFile() as flags:
        worker.barrier_file(flags, run.ranks)
        args = (Path(flags.name), peers, run.cases, run.rounds, run.busy, run.device)
        if name:
            mpi.run((name, run.prefixes.get(name)), worker.work, args, run.ranks, on_message)
        else:
            processes.run(worker.work, args, run.ranks, on_message)
    return found


def draw(path: Path, found: Sequence[table.Line], ranks: int, caption: str) -> None:
    """Bandwidth over size, a panel for each verb and dtype, with the limit."""
    from pycomm.bench.support import plots  # imports matplotlib, which may be missing

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
    panels = plots.grouped(found, lambda line: f"{line.verb}, {line.dtype}", panel)
    plots.save(path, panels, title, f"{ranks} ranks, {caption}", 3.6)
