"""Converts the ranks' times to lines of figures, and those to the text of nccl-tests."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pycomm.bench.collectives.cases import THEIRS, VERBS
from pycomm.bench.collectives.limits import TOLERANCE, limit_s
from pycomm.bench.collectives.worker import Times

COPY = "copy "  # prefix of the names of the copies
COMPARATORS = ("gloo", "nccl")  # the first that takes part
FLOOR = "fake"  # moves nothing, so the limit is not its
FAR = 3.0  # times the time: a 99th percentile above is marked


@dataclass(frozen=True, kw_only=True)
class Row:
    """What the columns of nccl-tests tell beside Line, and the load."""

    redop: str = "none"
    root: int = -1
    other_us: float | None = None  # the median in place, or out of place
    other_wrong: int | None = None
    loaded: bool = False  # the machine had more to do than processors


@dataclass(frozen=True)
class Line(Row):
    """One contestant in one case. Times are the slowest rank's; a GB is 10^9 bytes, as there.

    All figures but other_us and other_wrong are of the form of pycomm's call.
    """

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
    copy_s = min(max(typical(t.seconds[name]) for t in by_rank) for name in copies)
    fastest_s = limit_s(case, copy_s)
    times = {name: max(typical(t.seconds[name]) for t in by_rank) for name in by_rank[0].wrong}
    return [_line(name, by_rank, times, fastest_s) for name in times]


def _line(name: str, by_rank: Sequence[Times], times: dict[str, float], fastest_s: float) -> Line:
    case, time_s = by_rank[0].case, times[name]
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
        p99_us=max(p99([s for series in rounds for s in series]) for rounds in per_rank) * 1e6,
        algbw_gbs=algbw,
        busbw_gbs=algbw * case.kind.bus_factor(case.size),
        wrong=sum(t.wrong[name] for t in by_rank),
        ratio=times[comparator] / time_s if comparator else None,
        limit_percent=100 * fastest_s / time_s,
        limit_us=fastest_s * 1e6,
        worst_us=max(statistics.median(s) for rounds in per_rank for s in rounds) * 1e6,
        rounds=len(per_rank[0]),
        redop=case.redop if case.kind.reduces else "none",
        root=case.root if case.kind.rooted else -1,
    )


def merged(found: Sequence[Line], others: Sequence[Line], **more: Any) -> list[Line]:
    """The lines of a case, with what is known of its other form, by peer."""
    known: dict[str, dict[str, Any]] = {
        one.peer: {"other_us": one.time_us, "other_wrong": one.wrong} for one in others
    }
    return [replace(line, **more, **known.get(line.peer, {})) for line in found]


def faults(found: Sequence[Line], busy: bool = False) -> list[str]:
    """The reasons why this run is invalid; empty if it is valid.

    Beside a busy thread the copies of the limit wait for the interpreter too, so it is no limit.
    """
    messages = [
        f"{line.peer}: {line.verb} of {line.size_bytes} bytes: {wrong} elements are wrong"
        for line in found
        if (wrong := line.wrong + (line.other_wrong or 0))
    ]
    messages += [
        f"{line.peer}: {line.verb} of {line.size_bytes} bytes runs at "
        f"{line.limit_percent:.0f} % of the limit: the limit is wrong"
        for line in found
        if not busy and line.limit_percent > 100 * TOLERANCE and line.peer != FLOOR
    ]
    return messages


def head(peers: Sequence[str]) -> list[str]:
    """The lines above a table in which `peers` take part: nccl-tests', with more columns."""
    versus = "vs " + next((name for name in COMPARATORS if name in peers), COMPARATORS[0])
    form = "  {:>7}  {:>6}  {:>6} {:>6}"
    first = "# {:>10}  {:>12}  {:>8}  {:>6}  {:>6}"
    more = "  {:>16}  {:>9}  {:>8}  {:>7}"
    names, units = ("time", "algbw", "busbw", "#wrong"), ("(us)", "(GB/s)", "(GB/s)", "")
    blank = " " * len(first.format(*[""] * 5))
    return [
        "#",
        f"#{blank[1:]}           out-of-place                       in-place",
        first.format("size", "count", "type", "redop", "root")
        + 2 * form.format(*names)
        + more.format("peer", "p99", versus, "% limit"),
        first.format("(B)", "(elements)", *[""] * 3)
        + 2 * form.format(*units)
        + more.format("", "(us)", "", "").rstrip(),
    ]


def row(line: Line, checked: bool = True) -> str:
    """A line as nccl-tests prints it, followed by the columns that it lacks."""
    bus = line.busbw_gbs / line.algbw_gbs if line.algbw_gbs else 0.0
    own = _form(line.time_us, line.size_bytes, bus, line.wrong if checked else None)
    other = "".join(f"  {'N/A':>{width}}" for width in (7, 6, 6, 5))
    if line.other_us is not None:
        wrong = line.other_wrong if checked else None
        other = _form(line.other_us, line.size_bytes, bus, wrong)
    kind = THEIRS.get(line.dtype, line.dtype)
    ratio = "-" if line.ratio is None else f"{line.ratio:.2f}x"
    limit = f"{line.limit_percent:.1f}" if line.limit_percent else "-"
    return (
        f"{line.size_bytes:12}  {line.count:12}  {kind:>8}  {line.redop:>6}  {line.root:6}"
        + (other + own if VERBS[line.verb].in_place else own + other)
        + f"  {line.peer:>16}  {line.p99_us:9.2f}  {ratio:>8}  {limit:>7}  {_marks(line)}".rstrip()
    )


def _form(time_us: float, size_bytes: int, bus: float, wrong: int | None) -> str:
    digits = 0 if time_us >= 10_000 else 1 if time_us >= 100 else 2
    algbw = size_bytes / time_us / 1e3
    shown = "N/A" if wrong is None else str(wrong)
    return f"  {time_us:7.{digits}f}  {algbw:6.2f}  {algbw * bus:6.2f}  {shown:>5}"


def _marks(line: Line) -> str:
    return ("!" if line.p99_us > FAR * line.time_us else "") + ("*" if line.loaded else "")


def foot(found: Sequence[Line], checked: bool = True) -> list[str]:
    """The lines below all tables: those of nccl-tests, and what the marks mean."""
    wrong = sum(line.wrong + (line.other_wrong or 0) for line in found)
    verdict = f"{wrong} {'FAILED' if wrong else 'OK'}" if checked else "not checked"
    shown = [f"# Out of bounds values : {verdict}"]
    for i, peer in enumerate(dict.fromkeys(line.peer for line in found)):
        rates = [rate for line in found if line.peer == peer for rate in _rates(line)]
        name = "   " if i == 0 else f" of {peer}"  # parsers of nccl-tests read one
        shown.append(f"# Avg bus bandwidth{name} : {statistics.mean(rates):.5g}")
    marks = "".join(map(_marks, found))
    if "!" in marks:
        shown.append(f"# !: the 99th percentile is above {FAR:g} times the time")
    if "*" in marks:
        shown.append("# *: the load was above the number of processors, which makes times longer")
    return shown


def _rates(line: Line) -> list[float]:
    """The bus bandwidths of a line's forms."""
    other = [line.busbw_gbs * line.time_us / line.other_us] if line.other_us else []
    return [line.busbw_gbs, *other]


def typical(rounds: Sequence[Sequence[float]]) -> float:
    """The median over rounds of each round's median."""
    return statistics.median(statistics.median(series) for series in rounds)


def p99(seconds: Sequence[float]) -> float:
    """The smallest time that at least 99 % of the calls do not exceed."""
    return float(np.percentile(seconds, 99, method="inverted_cdf"))
