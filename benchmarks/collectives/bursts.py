"""`python -m benchmarks bursts`: short series of calls after a pause of --idle seconds.

In a pause the system may put two ranks on one processor. Each series (a burst) is timed as a whole:
40 calls, on four buffers in turn or on one. Contestants and buffers take turns, each once with the
ranks free to move and once with every thread bound to a processor of its rank. Exits with 1 if the
worst burst of one of pycomm's takes more than 1.5 times the median of its bound ranks.

Also timed is "copy", in which each rank copies as many bytes in its own memory: its slow bursts,
and those of bound ranks, are the machine's.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.support import command
from pycomm.bench.collectives.cases import VERBS, Case
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.peers import OURS, PEERS, Peer
from pycomm.bench.collectives.verbs import Arrays, Call
from pycomm.bench.collectives.worker import WARM_UP, Barrier, barrier_file
from pycomm.bench.support import processes
from pycomm.bench.support.sizes import format_size, parse_sizes

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


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status."""
    counts: dict[str, Any] = {"idle": (0.1, "the pause in s"), "rounds": (40, "bursts")}
    parser, known = command.parser("bursts", __doc__, ranks=(2, ""), **counts), OURS | PEERS
    parser.add_argument("--sizes", type=parse_sizes, default="4K,1M,16M", help="(%(default)s)")
    command.add_names(parser, "ops", VERBS, ["all_reduce"])
    command.add_names(parser, "peers", known, ["pycomm", "pycomm-direct"])
    options = parser.parse_args(argv)
    if not options.peers or options.ranks < 2 or min(options.rounds, options.idle) <= 0:
        parser.error("at least one peer, 2 ranks, 1 round and a pause are needed")
    cases = [Case(v, "float32", size, options.ranks) for v in options.ops for size in options.sizes]
    rows: list[dict[str, Any]] = []
    show = command.by_case(options.ranks, lambda reports: rows.extend(rows_of(reports)))
    peers = [known[name] for name in options.peers]
    with barrier_file(options.ranks) as flags:
        args = (flags, peers, cases, options.rounds, options.idle)
        processes.run(_work, args, options.ranks, show)
    settings = command.chosen(options, "ranks", "rounds", "peers")
    command.report(options.json, settings=settings, rows=rows)
    for message in (messages := faults(rows)):
        command.CONSOLE.print(message, style="red")
    return 1 if messages else 0


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
            (
                Series(case, peer.name if peer else "copy", buffers, bound, []),
                [
                    groups.call(peer, Arrays(case, rank.rank, peer.shares)) if peer else _copy(case)
                    for _ in range(buffers)
                ],
            )
            for peer, buffers, bound in itertools.product([*peers, None], BUFFERS, (True, False))
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


def _copy(case: Case) -> Call:
    source, target = torch.ones(2, case.bytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


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


def rows_of(by_rank: Sequence[Sequence[Series]]) -> list[dict[str, Any]]:
    """The rows of one case, from the reports of all ranks, in rank order. Times are the slowest
    rank's, in microseconds a call."""
    rows = []
    for of_ranks in zip(*by_rank, strict=True):
        first = of_ranks[0]
        slowest = [max(times) * 1e6 for times in zip(*(s.seconds for s in of_ranks), strict=True)]
        median_us = statistics.median(slowest)
        if first.bound:
            bound_us, slow_bound = median_us, sum(us > SLOWEST * median_us for us in slowest)
            continue
        rows.append(
            {
                "verb": first.case.verb,
                "size_bytes": first.case.bytes,
                "peer": first.peer,
                "buffers": first.buffers,
                "bound_us": bound_us,  # median of bursts, every rank on a processor of its own
                "median_us": median_us,  # of bursts, ranks free to move
                "worst_us": max(slowest),
                "slow": sum(us > SLOWEST * bound_us for us in slowest),  # bursts
                "slow_bound": slow_bound,  # of the bound ranks, so not because of placement
                "bursts": len(slowest),
            }
        )
    return rows


def faults(rows: Sequence[dict[str, Any]]) -> list[str]:
    """One sentence for each contestant of pycomm's with a slow burst."""
    return [
        f"{row['peer']}: {row['verb']} of {format_size(row['size_bytes'])}, "
        f"buffers={row['buffers']}: {row['slow']} of {row['bursts']} bursts take more than "
        f"{SLOWEST} times as long as with bound ranks, of which {row['slow_bound']} do; the worst "
        f"takes {row['worst_us']:.0f} us"
        for row in rows
        if row["slow"] and row["peer"] in OURS
    ]
