"""`python -m benchmarks connection_flood`: hostile connections, and starts and stops on one port.

    flood      two ranks with 1,024 descriptors form and train while unauthenticated clients connect
               to every listener, in each of the manners of unauthenticated.py. The step rate is
               compared with the rate while they connect to an unused port, so that both include the
               processor time of the clients
    cycles     rank 0 starts and stops a group on one port in one process, with a rank 1 that is
               another process each time and is killed in every second one
    distant    ranks that are 10, 50 and 100 ms away join a group, and connect in mid-run to a rank
               that they have not met, beside 8,000, 1,500 and 800 hostile connections a second
               (delayed_flood.py): pycomm only, since gloo forms no group among unauthenticated
               clients

The first two use pycomm and gloo, in turn. Exits with 1 if pycomm failed, leaked a descriptor, made
less than nine tenths of the steps, or delayed a distant rank by more than 2 s.
"""

from __future__ import annotations

import argparse
import multiprocessing as mp
import os
import secrets
import socket
import statistics
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.reliability import connection_flood_rank
from benchmarks.reliability.connection_flood_rank import FORM_LIMIT_S, STANDS, Held, Place
from benchmarks.reliability.delayed_flood import CASES, measure
from benchmarks.reliability.delayed_flood import table as distant_table
from pycomm.bench.support import delayed_link, machine, summaries

BACKENDS = ("pycomm", "gloo")
PER_S = 2000  # calls of the unauthenticated clients
STEPS = 3000  # of a stretch: about a second
STRETCHES = 5
WARM_CYCLES = 10  # before what is open is counted
MOST_FAILURES = 5  # then the cycles end
LEAST_KEPT = 0.9
SLICE_S = 0.5
WIDTH = 120  # of the tables


@dataclass
class Flood:
    """The outcome of one job among unauthenticated clients; seconds and rates of rank 0."""

    backend: str
    connected: int = 0  # connections of unauthenticated clients
    refused: int = 0
    forming_quiet_s: float = -1.0
    forming_s: float = -1.0
    steps_per_s_decoy: float = 0.0
    steps_per_s: float = 0.0
    descriptors_quiet: int = 0
    descriptors: int = 0  # after the flood
    let_in: int = 0  # clients that received more than an unauthenticated client may
    error: str = ""


@dataclass
class Cycles:
    """The outcome of starts and stops; open descriptors after the first and the last of them."""

    backend: str
    cycles: int = 0
    failures: list[str] = field(default_factory=list)
    first: Held | None = None  # at least, in some cycles
    last: Held | None = None
    files: int = 0  # left in /dev/shm
    seconds: float = 0.0


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm bench connection_flood", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--connections", type=int, default=10_000, help="(%(default)s)")
    parser.add_argument("--cycles", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--peers", default=",".join(BACKENDS), help="(%(default)s)")
    parser.add_argument("--rounds", type=int, default=5, help="of each distance (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store what was found")
    options = parser.parse_args(argv)
    peers = options.peers.split(",")
    if bad := [peer for peer in peers if peer not in BACKENDS]:
        parser.error(f"no {bad[0]!r}: --peers takes some of {', '.join(BACKENDS)}")
    console = Console(width=WIDTH, highlight=False)
    floods, rounds = [], []
    context = mp.get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.reliability.connection_flood_rank"])
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=len(peers) * (2 + options.cycles) + CASES)
        for backend in peers:
            bar.update(
                task, description=f"{backend}: {options.connections} unauthenticated clients"
            )
            floods.append(flood(context, backend, options.connections))
            bar.update(task, advance=2, description=f"{backend}: starts and stops")
            rounds.append(cycles(context, backend, options.cycles, lambda: bar.advance(task)))
        bar.update(task, description="ranks far away")
        why_not = "no rounds" if options.rounds < 1 else delayed_link.missing()
        far = [] if why_not else measure(options.rounds, lambda: bar.advance(task))
    console.print(_flood_table(floods))
    console.print(_cycle_table(rounds))
    console.print(distant_table(far) if far else f"no distant ranks: {why_not}")
    if options.json:
        content = {
            "machine": machine.describe(),
            "flood": [asdict(one) for one in floods],
            "cycles": [asdict(one) for one in rounds],
            "distant": [one.summary() for one in far],
        }
        summaries.write(options.json, content)
    kept = all(map(_kept, floods)) and all(map(_clean, rounds))
    return 0 if kept and all(one.kept() for one in far) else 1


def _kept(one: Flood) -> bool:
    return one.backend != "pycomm" or (
        not one.error
        and not one.let_in
        and one.descriptors <= one.descriptors_quiet
        and one.steps_per_s >= LEAST_KEPT * one.steps_per_s_decoy
    )


def _clean(one: Cycles) -> bool:
    return one.backend != "pycomm" or not (one.failures or _leaked(one) or one.files)


def _leaked(one: Cycles) -> int:
    """Descriptors and threads after the last cycle beyond those after the first."""
    if one.first is None or one.last is None:
        return 0
    return max(
        one.last.descriptors - one.first.descriptors, one.last.threads - one.first.threads, 0
    )


def flood(context: Any, backend: str, connections: int) -> Flood:
    """Runs a job without unauthenticated clients, then one with them, while it forms and while it
    trains."""
    found = Flood(backend)
    with _Job(context, backend) as quiet:
        quiet.start(0)
        quiet.start(1)
        found.forming_quiet_s = quiet.form()
        quiet.rate()
        found.descriptors_quiet = quiet.held.descriptors
    with _Job(context, backend) as job:
        try:
            job.start(0)
            clients = _UnauthenticatedClients(context, job, job.place.port, connections)
            clients.wait_for(0.9)  # rank 1 joins among them
            job.start(1)
            found.forming_s = job.form()
            clients.end(found)
            rates: dict[bool, list[float]] = {False: [], True: []}
            for stretch in range(2 * STRETCHES):
                decoy = stretch % 2 == 0
                port = _free_port() if decoy else job.place.port
                goal = connections // STRETCHES
                clients = _UnauthenticatedClients(context, job, port, goal, decoy=decoy)
                rates[decoy].append(job.rate())
                clients.end(None if decoy else found)
            found.steps_per_s_decoy = statistics.median(rates[True])
            found.steps_per_s = statistics.median(rates[False])
            job.rate()
            found.descriptors = job.held.descriptors
        except RuntimeError as error:  # is reported in the table
            found.error = str(error)
    return found


class _Job:
    """Two ranks of connection_flood_rank.train."""

    def __init__(self, context: Any, backend: str) -> None:
        self.place = Place(backend, _free_port(), secrets.token_hex(32))
        self.held = Held(0, 0, 0)  # by rank 0 in its last report
        self._context = context
        self._pipes: list[Connection] = []
        self.processes: list[Any] = []

    def __enter__(self) -> _Job:
        return self

    def __exit__(self, *_: object) -> None:
        for pipe in self._pipes:
            pipe.close()
        for process in self.processes:
            process.kill()
            process.join()

    def start(self, rank: int) -> None:
        ours, theirs = self._context.Pipe()
        arguments = (theirs, self.place, rank)
        self.processes.append(
            self._context.Process(target=connection_flood_rank.train, args=arguments, daemon=True)
        )
        self.processes[-1].start()
        theirs.close()
        self._pipes.append(ours)

    def form(self) -> float:
        """Seconds that rank 1, the last, took to join the group."""
        return [self._received(pipe, STANDS) for pipe in self._pipes][1]

    def rate(self) -> float:
        """Steps per second of one stretch."""
        for pipe in self._pipes:
            pipe.send(STEPS)
        rates = [self._received(pipe, connection_flood_rank.TRAIN) for pipe in self._pipes]
        return rates[0]

    def _received(self, pipe: Connection, wanted: str) -> float:
        """The next report of a rank. Raises RuntimeError if it failed or is silent."""
        if not _comes(pipe, 2 * FORM_LIMIT_S):
            raise RuntimeError("a rank hangs")
        try:
            what, figure, held = pipe.recv()
        except EOFError:  # the pipe is closed
            raise RuntimeError("a rank ended without a report") from None
        if what != wanted:
            raise RuntimeError(what)
        if pipe is self._pipes[0]:
            self.held = held
        return float(figure)


class _UnauthenticatedClients:
    """A process that connects to `port`, at most `goal` times."""

    def __init__(
        self, context: Any, job: _Job, port: int, goal: int, *, decoy: bool = False
    ) -> None:
        self._pipe, theirs = context.Pipe()
        pids = [process.pid for process in job.processes]
        arguments = (theirs, pids, port, decoy)
        self._process = context.Process(
            target=connection_flood_rank.be_strange, args=arguments, daemon=True
        )
        self._process.start()
        theirs.close()
        self._pipe.send((goal, PER_S))
        self._seconds = goal / PER_S

    def wait_for(self, part: float) -> None:
        """Waits until about this fraction of the clients have connected."""
        self._process.join(part * self._seconds)

    def end(self, found: Flood | None) -> None:
        """Waits until all have connected, and adds them to `found`."""
        late = not _comes(self._pipe, 10 * self._seconds + FORM_LIMIT_S)
        connected, refused, let_in = (0, 0, 0) if late else self._pipe.recv()
        if found is not None:
            found.connected += connected
            found.refused += refused
            found.let_in += let_in
        self._process.kill()
        self._process.join()


def cycles(context: Any, backend: str, count: int, advance: Any) -> Cycles:
    """Starts and stops; a rank 0 that fails or hangs is restarted."""
    found = Cycles(backend)
    place = Place(backend, _free_port(), secrets.token_hex(32))
    before, begin = set(os.listdir("/dev/shm")), time.monotonic()
    pipe, rank0 = _rank0(context, place)
    open_: list[Held] = []  # after each cycle of this rank 0
    for number in range(count):
        dies = number % 2 == 1
        ours, theirs = context.Pipe()
        rank1 = context.Process(target=connection_flood_rank.cycle, args=(theirs, place, 1, dies))
        rank1.start()
        theirs.close()
        pipe.send(dies)
        failure, held = _ended(pipe)
        rank1.join(FORM_LIMIT_S)
        if rank1.exitcode != (-9 if dies else 0) and not failure:
            failure = f"rank 1 ended with {rank1.exitcode}"
        rank1.kill()
        rank1.join()
        ours.close()
        found.cycles += 1
        advance()
        if failure:
            found.failures.append(f"cycle {number}: {failure[:200]}")
            rank0.kill()
            rank0.join()
            if len(found.failures) == MOST_FAILURES:
                break
            pipe, rank0 = _rank0(context, place)
            open_ = []  # of another process
        else:
            open_.append(held)
    rank0.kill()
    rank0.join()
    found.first = _least(open_[WARM_CYCLES : 2 * WARM_CYCLES])
    found.last = _least(open_[-WARM_CYCLES:])
    found.seconds = time.monotonic() - begin
    found.files = len(set(os.listdir("/dev/shm")) - before)
    return found


def _least(some: Sequence[Held]) -> Held | None:
    """The least of each count: a socket that still sends its last bytes counts for a while."""
    if not some:
        return None
    return Held(
        min(held.descriptors for held in some),
        min(held.threads for held in some),
        min(held.mappings for held in some),
    )


def _rank0(context: Any, place: Place) -> tuple[Connection, Any]:
    ours, theirs = context.Pipe()
    process = context.Process(
        target=connection_flood_rank.cycles, args=(theirs, place), daemon=True
    )
    process.start()
    theirs.close()
    return ours, process


def _ended(pipe: Connection) -> tuple[str, Held]:
    """The failure of rank 0's cycle, "" if none."""
    nothing = Held(0, 0, 0)
    if not _comes(pipe, 2 * FORM_LIMIT_S):
        return "rank 0 hangs", nothing
    try:
        failure, held = pipe.recv()
    except EOFError:  # a failure to be counted, not the end of the run
        return "rank 0 has ended", nothing
    return str(failure), held


def _comes(pipe: Connection, seconds: float) -> bool:
    """Whether data arrives in this time. Only the time in which this process runs counts, as the
    machine may pause it."""
    return any(pipe.poll(SLICE_S) for _ in range(round(seconds / SLICE_S)))


def _free_port() -> int:
    """A free port of 127.0.0.1."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _flood_table(found: Sequence[Flood]) -> Table:
    shown = Table()
    for name in ("", "clients", "formed in", "alone", "steps/s", "calls elsewhere", "leaked", ""):
        shown.add_column(name)
    for one in found:
        shown.add_row(
            one.backend,
            f"{one.connected} in, {one.refused} refused",
            f"{one.forming_s:.3f} s" if one.forming_s >= 0 else "never",
            f"{one.forming_quiet_s:.3f} s",
            f"{one.steps_per_s:.0f}",
            f"{one.steps_per_s_decoy:.0f}",
            str(one.descriptors - one.descriptors_quiet) if not one.error else "",
            one.error[:80],
        )
    return shown


def _cycle_table(found: Sequence[Cycles]) -> Table:
    shown = Table()
    for name in ("", "cycles", "failures", "leaked", "files", "seconds", "first failure"):
        shown.add_column(name)
    for one in found:
        first = one.failures[0][:80] if one.failures else ""
        figures = (one.cycles, len(one.failures), _leaked(one), one.files, round(one.seconds))
        shown.add_row(one.backend, *map(str, figures), first)
    return shown
