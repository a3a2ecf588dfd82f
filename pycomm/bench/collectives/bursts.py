"""`pycomm bench collectives --idle S`: short series of calls after a pause of S seconds.

In a pause the system may put two ranks on one processor. Each series (a burst) is timed as a whole:
40 calls, on four buffers in turn or on one. Contestants and buffers take turns, each once with the
ranks free to move and once with every thread bound to a processor of its rank. A contestant of
pycomm's fails if its worst burst takes more than 1.5 times the median of its bound ranks.
"""

from __future__ import annotations

import itertools
import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console

from pycomm.bench.collectives.peers import OURS, Groups, Peer
from pycomm.bench.collectives.verbs import Arrays, Call, Case
from pycomm.bench.collectives.worker import WARM_UP, Barrier, barrier_file
from pycomm.bench.support import processes
from pycomm.bench.support.sizes import format_size

CALLS = 40
"""Of one burst."""

BUFFERS = (4, 1)
SLOWEST = 1.5
"""How much longer than the bound ranks' median the worst burst of pycomm's may take."""


@dataclass(frozen=True)
class Series:
    """One contestant in one case; `seconds` are those of a call, by burst."""

    case: Case
    peer: str
    buffers: int
    bound: bool
    seconds: list[float]


@dataclass(frozen=True)
class Row:
    """One contestant in one case. Times are the slowest rank's, in microseconds a call."""

    verb: str
    size_bytes: int
    peer: str
    buffers: int
    bound_us: float  # median of bursts, every rank on a processor of its own
    median_us: float  # of bursts, ranks free to move
    worst_us: float
    slow: int  # bursts above SLOWEST times bound_us
    bursts: int


def measure(
    console: Console, peers: list[Peer], cases: list[Case], ranks: int, bursts: int, idle_s: float
) -> list[Row]:
    """Runs all cases on fresh processes; prints the rows of each as soon as all ranks have it."""
    rows: list[Row] = []
    waiting: dict[Case, dict[int, list[Series]]] = {}
    console.print(header())

    def on_message(rank: int, reported: list[Series]) -> None:
        by_rank = waiting.setdefault(reported[0].case, {})
        by_rank[rank] = reported
        if len(by_rank) == ranks:
            new = rows_of([by_rank[r] for r in range(ranks)])
            rows.extend(new)
            for row in new:
                console.print(text(row))

    with tempfile.NamedTemporaryFile() as flags:
        barrier_file(flags, ranks)
        processes.run(_work, (Path(flags.name), peers, cases, bursts, idle_s), ranks, on_message)
    return rows


def _work(
    rank: processes.Rank,
    flags: Path,
    peers: list[Peer],
    cases: list[Case],
    bursts: int,
    idle_s: float,
) -> None:
    """Reports a list of Series for each case."""
    torch.set_num_threads(1)
    groups = Groups(peers, rank.store, rank.rank, rank.size)
    barrier = Barrier(flags, rank.rank, rank.size)
    for case in cases:
        contestants = [
            (Series(case, peer.name, buffers, bound, []), _calls(groups, peer, case, rank, buffers))
            for peer, buffers, bound in itertools.product(peers, BUFFERS, (True, False))
        ]
        for _, calls in contestants:
            _run(calls, WARM_UP)
        for _ in range(bursts):
            for series, calls in contestants:
                with _bound(rank.rank if series.bound else None):
                    time.sleep(idle_s)  # the pause that is measured
                    barrier()
                    start = time.perf_counter()
                    _run(calls, CALLS)
                    series.seconds.append((time.perf_counter() - start) / CALLS)
        rank.send([series for series, _ in contestants])
    barrier()


def _calls(
    groups: Groups, peer: Peer, case: Case, rank: processes.Rank, buffers: int
) -> list[Call]:
    return [groups.call(peer, Arrays(case, rank.rank, peer.shares)) for _ in range(buffers)]


def _run(calls: Sequence[Call], count: int) -> None:
    for i in range(count):
        calls[i % len(calls)]()


@contextmanager
def _bound(rank: int | None) -> Iterator[None]:
    """Binds all threads of this process to one of its processors; None: leaves them free."""
    before = sorted(os.sched_getaffinity(0))
    if rank is not None:
        _bind([before[rank % len(before)]])
    try:
        yield
    finally:
        if rank is not None:
            _bind(before)


def _bind(processors: Sequence[int]) -> None:
    for thread in os.listdir("/proc/self/task"):
        try:
            os.sched_setaffinity(int(thread), processors)
        except ProcessLookupError:  # the thread has ended meanwhile
            continue


def rows_of(by_rank: Sequence[Sequence[Series]]) -> list[Row]:
    """The rows of one case, from the reports of all ranks, in rank order."""
    rows = []
    for of_ranks in zip(*by_rank, strict=True):
        first = of_ranks[0]
        slowest = [max(times) * 1e6 for times in zip(*(s.seconds for s in of_ranks), strict=True)]
        if first.bound:
            bound_us = statistics.median(slowest)
            continue
        rows.append(
            Row(
                verb=first.case.verb,
                size_bytes=first.case.bytes,
                peer=first.peer,
                buffers=first.buffers,
                bound_us=bound_us,
                median_us=statistics.median(slowest),
                worst_us=max(slowest),
                slow=sum(us > SLOWEST * bound_us for us in slowest),
                bursts=len(slowest),
            )
        )
    return rows


def faults(rows: Sequence[Row]) -> list[str]:
    """One sentence for each contestant of pycomm's with a slow burst."""
    return [
        f"{row.peer}: {row.verb} of {format_size(row.size_bytes)}, buffers={row.buffers}: "
        f"{row.slow} of {row.bursts} bursts take more than {SLOWEST} times as long as with bound "
        f"ranks; the worst takes {row.worst_us:.0f} us"
        for row in rows
        if row.slow and row.peer in OURS
    ]


def header() -> str:
    """Over the lines of text()."""
    return (
        f"{'# verb':>14} {'size':>6} {'peer':>14} {'buffers':>7} {'bound (us)':>10} "
        f"{'free (us)':>10} {'worst (us)':>10} {'worst/bound':>11} {'slow':>4} {'bursts':>6}"
    )


def text(row: Row) -> str:
    """One line under header()."""
    return (
        f"{row.verb:>14} {format_size(row.size_bytes):>6} {row.peer:>14} {row.buffers:>7} "
        f"{row.bound_us:>10.2f} {row.median_us:>10.2f} {row.worst_us:>10.2f} "
        f"{row.worst_us / row.bound_us:>11.2f} {row.slow:>4} {row.bursts:>6}"
    )
