"""`pycomm trace`: merges the ranks' traces into one timeline for a trace viewer, with a table of
waits.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from pycomm import _core
from pycomm._tables import Table
from pycomm.errors import InvalidArgument
from pycomm.observe import flight_recorder
from pycomm.observe.flight_recorder import FlightRecord

# Operations in which every rank waits for every other.
TOGETHER = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "barrier")
VIEWER = "https://ui.perfetto.dev"  # also chrome://tracing; the page keeps the file on the machine


@dataclass
class RankTrace:
    """One rank of the run: its flight records, one for each group, and its totals.

    Times are in nanoseconds; `late` is how long others waited because this rank was last.
    """

    label: str
    flight_records: list[FlightRecord] = field(default_factory=list)
    calls: int = 0
    inside: int = 0
    waited: int = 0
    bytes_written: int = 0
    last: int = 0
    late: int = 0


@dataclass
class Timeline:
    """The ranks of a run on one clock.

    Attributes:
        ranks: in order.
        shifts: by host_id: nanoseconds to add to its steady clock to get the first host's.
        uncertainties: by host_id: the possible error of the shift, in nanoseconds.
        waits: by (source, index of the record): the time on its own clock until which the rank
            waited for another to begin the call, and the other's rank in the group.
    """

    ranks: list[RankTrace]
    shifts: dict[str, int]
    uncertainties: dict[str, int]
    waits: dict[tuple[str, int], tuple[int, int]]


def merge(folder: str | Path) -> Timeline:
    """Merges the traces of a folder.

    Raises:
        InvalidArgument: the folder has no traces, or a file is damaged.
    """
    paths = sorted(Path(folder).glob("*.trace"))
    if not paths:
        raise InvalidArgument(f"{folder} has no traces: run the program with PYCOMM_TRACE={folder}")
    flight_records = [one for one in map(flight_recorder.read, paths) if len(one.records)]
    groups = _newest(flight_recorder.groups_of(flight_records))
    shifts, uncertainties = _clocks(groups)
    timeline = Timeline(_ranks(groups), shifts, uncertainties, {})
    for group in groups:
        _find_waits(timeline, group)
    return timeline


def _newest(groups: list[list[FlightRecord]]) -> list[list[FlightRecord]]:
    """The last group of each name: the folder may also contain files of an earlier run."""
    newest: dict[str, list[FlightRecord]] = {}
    for group in sorted(groups, key=lambda group: group[0].wall_ns):
        newest[group[0].name] = group
    return list(newest.values())


def _ranks(groups: list[list[FlightRecord]]) -> list[RankTrace]:
    """Matches the ranks of several groups: by process, or by thread if ranks are threads."""
    found: dict[tuple[Any, ...], RankTrace] = {}
    for group in sorted(groups, key=lambda group: (-group[0].size, group[0].name)):
        processes = {(one.host_id, one.pid) for one in group}
        for one in group:
            thread = () if len(processes) == len(group) else (one.rank,)
            label = f"rank {one.rank} ({one.host}, pid {one.pid})"
            rank = found.setdefault((one.host_id, one.pid, *thread), RankTrace(label))
            rank.flight_records.append(one)
            rank.calls += one.begun
            rank.inside += one.inside
            rank.waited += one.waited
            rank.bytes_written += one.bytes_written
    return list(found.values())


def _together(group: list[FlightRecord]) -> tuple[Any, Any, list[Any]]:
    """The calls that all ranks of a group completed: begin and end times as arrays of [ranks,
    calls] on each rank's own clock, and for each rank the indices of its records.
    """
    verbs = [_core.OPERATIONS.index(verb) for verb in TOGETHER]
    keys, places = [], []
    for one in group:
        ended = np.isin(one.records["operation"], verbs) & (one.records["outcome"] == 1)
        at = np.flatnonzero(ended)
        epochs = one.records["epoch"][at].astype(np.int64)
        keys.append((epochs << 32) | one.records["sequence"][at])
        places.append(at)
    common = keys[0]
    for one in keys[1:]:
        common = np.intersect1d(common, one)
    chosen = [at[np.searchsorted(key, common)] for at, key in zip(places, keys, strict=True)]
    pairs = list(zip(group, chosen, strict=True))
    begins = np.array([one.records["begun"][at] for one, at in pairs])
    return begins, np.array([one.records["ended"][at] for one, at in pairs]), chosen


def _clocks(groups: list[list[FlightRecord]]) -> tuple[dict[str, int], dict[str, int]]:
    """By host: the shift of its clock and the uncertainty, both in nanoseconds.

    When a rank completes such a call all ranks have begun it. The end on one host is after each
    begin on the other, which bounds the difference of their clocks from both sides; the middle is
    used. Hosts that share no group with the first one use Unix time.
    """
    largest = max(groups, key=lambda group: len({one.host_id for one in group}))
    first = largest[0]
    shifts, uncertainties = {first.host_id: 0}, {first.host_id: 0}
    begins, ends, _ = _together(largest)
    hosts = np.array([one.host_id for one in largest])
    for one in (one for group in groups for one in group):
        if one.host_id in shifts:
            continue
        here, there = hosts == first.host_id, hosts == one.host_id
        if not there.any() or not begins.size:
            shifts[one.host_id] = (one.wall_ns - one.steady_ns) - (first.wall_ns - first.steady_ns)
            uncertainties[one.host_id] = 1_000_000_000
            continue
        least = int((begins[here].max(axis=0) - ends[there].min(axis=0)).max())
        most = int((ends[here].min(axis=0) - begins[there].max(axis=0)).min())
        shifts[one.host_id], uncertainties[one.host_id] = (
            (least + most) // 2,
            abs(most - least) // 2,
        )
    return shifts, uncertainties


def _find_waits(timeline: Timeline, group: list[FlightRecord]) -> None:
    """Finds which rank each rank waited for at the beginning of each call."""
    begins, ends, chosen = _together(group)
    if len(group) < 2 or not begins.size:
        return
    shifts = np.array([timeline.shifts[one.host_id] for one in group])[:, None]
    begins = begins + shifts
    last, latest = begins.argmax(axis=0), begins.max(axis=0)
    until = np.minimum(latest, ends + shifts)
    waited = np.maximum(until - begins, 0)
    owners = {id(one): rank for rank in timeline.ranks for one in rank.flight_records}
    for i, one in enumerate(group):
        mine = owners[id(one)]
        mine.last += int((last == i).sum())
        # The longest wait caused by this rank alone: that of the first rank to call.
        mine.late += int(waited.max(axis=0)[last == i].sum())
        for j in np.flatnonzero(waited[i]):
            until_own = int(until[i, j] - shifts[i, 0])
            timeline.waits[one.source, int(chosen[i][j])] = until_own, group[int(last[j])].rank


def events(timeline: Timeline) -> Iterator[dict[str, Any]]:
    """The timeline in the Trace Event Format: a process is a rank, a thread a group."""
    first = min(
        int(one.records["begun"][0]) + timeline.shifts[one.host_id]
        for rank in timeline.ranks
        for one in rank.flight_records
    )
    for pid, rank in enumerate(timeline.ranks):
        yield _names("process_name", pid, 0, {"name": rank.label})
        yield _names("process_sort_index", pid, 0, {"sort_index": pid})
        for tid, one in enumerate(rank.flight_records):
            yield _names("thread_name", pid, tid, {"name": f"group {one.name}"})
            shift = timeline.shifts[one.host_id] - first
            for i, call in enumerate(one.records):
                begun, ended = int(call["begun"]), int(call["ended"]) or int(call["begun"])
                place = {"ph": "X", "pid": pid, "tid": tid, "ts": (begun + shift) / 1e3}
                yield {
                    "name": flight_recorder.title(call),
                    "cat": "calls",
                    **place,
                    "dur": (ended - begun) / 1e3,
                    "args": _arguments(one, call),
                }
                if (one.source, i) in timeline.waits:
                    until, whom = timeline.waits[one.source, i]
                    name = f"waits for rank {whom}"
                    yield {"name": name, "cat": "waits", **place, "dur": (until - begun) / 1e3}


def _names(kind: str, pid: int, tid: int, args: dict[str, Any]) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": args}


def _arguments(one: FlightRecord, call: Any) -> dict[str, Any]:
    return {
        "group": one.name,
        "call": int(call["sequence"]),
        "epoch": int(call["epoch"]),
        "algorithm": flight_recorder.TABLES["algorithm"][call["algorithm"]],
        "bytes": flight_recorder.bytes_of(call),
        "bytes_written": int(call["bytes_written"]),
        "waited_us": int(call["waited"]) / 1e3,
        "outcome": flight_recorder.TABLES["outcome"][call["outcome"]],
    }


def write(timeline: Timeline, path: Path) -> int:
    """Writes the timeline as JSON, a line per event; returns the number of events."""
    count = 0
    with path.open("w") as file:
        file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
        for event in events(timeline):
            file.write((",\n" if count else "") + json.dumps(event))
            count += 1
        file.write("\n]}\n")
    return count


def table(timeline: Timeline) -> str:
    """A table of each rank's totals."""
    shown = Table(
        {"rank": "", "calls": ",", "in calls": ">", "waiting": ">", "came last": ","}
        | {"others waited": ">", "MB sent": ",.1f"}
    )
    for rank in timeline.ranks:
        share = f" ({100 * rank.waited / rank.inside:.0f} %)" if rank.inside else ""
        waiting = f"{rank.waited / 1e9:.3f} s{share}"
        totals = rank.calls, f"{rank.inside / 1e9:.3f} s", waiting, rank.last
        shown.add(rank.label, *totals, f"{rank.late / 1e9:.3f} s", rank.bytes_written / 1e6)
    lines = [str(shown)]
    for host, uncertainty in timeline.uncertainties.items():
        if uncertainty:
            name = next(
                o.host for r in timeline.ranks for o in r.flight_records if o.host_id == host
            )
            lines.append(f"the clock of {name} is exact to within {uncertainty / 1e3:,.0f} us")
    return "\n".join(lines)


def figures(timeline: Timeline) -> dict[str, Any]:
    """The totals of the table as JSON takes them; times in seconds."""
    times = ("inside", "waited", "late")
    ranks = [
        {"label": one.label, "calls": one.calls, "bytes_written": one.bytes_written}
        | {"came_last": one.last, **{f"{name}_s": getattr(one, name) / 1e9 for name in times}}
        for one in timeline.ranks
    ]
    clocks = {host: ns / 1e9 for host, ns in timeline.uncertainties.items()}
    return {"ranks": ranks, "clock_uncertainty_s": clocks}


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    timeline = merge(options.folder)
    out = options.out or options.folder / "trace.json"
    print(json.dumps(figures(timeline)) if options.json else table(timeline))
    count = write(timeline, out)
    if not options.json:
        print(f"{out}: {count:,} events; open it at {VIEWER} or in chrome://tracing")
    return 0
