"""Converts the ranks' times to lines of figures, and those to a table with nccl-tests' columns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from pycomm._tables import Table
from pycomm.bench.collectives.limits import TOLERANCE, limit_s
from pycomm.bench.collectives.verbs import VERBS
from pycomm.bench.collectives.worker import Times

COPY = "copy "  # prefix of the names of the copies
COMPARATORS = ("gloo", "nccl")  # the first that takes part
FLOOR = "fake"  # moves nothing, so the limit is not its


@dataclass(frozen=True)
class Line:
    """One contestant in one case. Times are the slowest rank's; a GB is 10^9 bytes, as there."""

    size_bytes: int
    count: int
    dtype: str
    verb: str
    peer: str
    time_us: float  # median over rounds of each round's median
    p99_us: float  # over all calls
    algbw_gbs: float
    busbw_gbs: float
    wrong: int
    ratio: float | None  # times faster than the comparator; None without one
    limit_percent: float  # of the speed that memory allows
    limit_us: float
    worst_us: float  # the largest median of a round, of any rank
    rounds: int
    mpi: str = ""  # whose mpiexec started the ranks


def lines(by_rank: Sequence[Times]) -> list[Line]:
    """The lines of one case, from the reports of all ranks, in rank order."""
    case = by_rank[0].case
    copies = [name for name in by_rank[0].seconds if name.startswith(COPY)]
    copy_s = min(_slowest([typical(t.seconds[name]) for t in by_rank]) for name in copies)
    fastest_s = limit_s(case, copy_s)
    times = {
        name: _slowest([typical(t.seconds[name]) for t in by_rank]) for name in by_rank[0].wrong
    }
    return [_line(name, by_rank, times, fastest_s) for name in times]


def _line(name: str, by_rank: Sequence[Times], times: dict[str, float], fastest_s: float) -> Line:
    case, time_s = by_rank[0].case, times[name]
    verb = VERBS[case.verb]
    algbw = case.bytes / time_s / 1e9
    per_rank = [t.seconds[name] for t in by_rank]
    comparator = next((other for other in COMPARATORS if other in times), "")
    return Line(
        size_bytes=case.bytes,
        count=case.count,
        dtype=case.dtype,
        verb=case.verb,
        peer=name,
        time_us=time_s * 1e6,
        p99_us=_slowest([_p99([s for series in rounds for s in series]) for rounds in per_rank])
        * 1e6,
        algbw_gbs=algbw,
        busbw_gbs=algbw * verb.bus_factor(case.size),
        wrong=sum(t.wrong[name] for t in by_rank),
        ratio=times[comparator] / time_s if comparator else None,
        limit_percent=100 * fastest_s / time_s,
        limit_us=fastest_s * 1e6,
        worst_us=_slowest([statistics.median(s) for rounds in per_rank for s in rounds]) * 1e6,
        rounds=len(per_rank[0]),
    )


def faults(found: Sequence[Line], busy: bool = False) -> list[str]:
    """The reasons why this run is invalid; empty if it is valid.

    Beside a busy thread the copies of the limit wait for the interpreter too, so it is no limit.
    """
    messages = [
        f"{line.peer}: {line.verb} of {line.size_bytes} bytes: {line.wrong} elements are wrong"
        for line in found
        if line.wrong
    ]
    messages += [
        f"{line.peer}: {line.verb} of {line.size_bytes} bytes runs at "
        f"{line.limit_percent:.0f} % of the limit: the limit is wrong"
        for line in found
        if not busy and line.limit_percent > 100 * TOLERANCE and line.peer != FLOOR
    ]
    return messages


def new(peers: Sequence[str]) -> Table:
    """A table for lines in which `peers` take part. Bandwidths are in GB/s, 10^9 bytes."""
    versus = "vs " + next((name for name in COMPARATORS if name in peers), COMPARATORS[0])
    first = {"# size (B)": ">10", "count": ">9", "type": ">8", "redop": ">5", "peer": ">13"}
    times = {"time (us)": "9.2f", "p99 (us)": "9.2f", "algbw": "6.2f", "busbw": "6.2f"}
    return Table(first | times | {"#wrong": ">6", versus: ">8", "% limit": "7.1f"})


def add(to: Table, line: Line) -> None:
    """Adds a line to a table of new()."""
    to.add(
        *(str(line.size_bytes), str(line.count), line.dtype, VERBS[line.verb].redop, line.peer),
        *(line.time_us, line.p99_us, line.algbw_gbs, line.busbw_gbs, str(line.wrong)),
        *(None if line.ratio is None else f"{line.ratio:.2f}x", line.limit_percent),
    )


def typical(rounds: Sequence[Sequence[float]]) -> float:
    """The median over rounds of each round's median."""
    return statistics.median(statistics.median(series) for series in rounds)


def _slowest(by_rank: Sequence[float]) -> float:
    return max(by_rank)


def _p99(seconds: Sequence[float]) -> float:
    """The smallest time that at least 99 % of the calls do not exceed."""
    return sorted(seconds)[-(-len(seconds) * 99 // 100) - 1]
