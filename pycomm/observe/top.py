"""`pycomm top`: shows what the ranks of this host do, and refreshes."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import time
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pycomm._tables import Table
from pycomm.errors import InvalidArgument
from pycomm.observe import flight_recorder, prometheus
from pycomm.observe.flight_recorder import FlightRecord
from pycomm.observe.sample import Sample, program, state_of

SVG_WIDTH = 84  # characters
STYLES = {"broken": "red", "stopped": "red", "late": "yellow"}


def facts(now: Sample, before: Sample | None = None) -> dict[str, Any]:
    """The groups, their ranks and the GPUs, as JSON takes them; rates are since `before`, or since
    the group was formed."""
    groups = flight_recorder.groups_of(now.flight_records)
    return {
        "time": time.time(),
        "groups": [_group(ranks, now, before) for ranks in groups],
        "gpus": [dataclasses.asdict(one) | {"pids": sorted(one.pids)} for one in now.gpus],
    }


def view(now: Sample, before: Sample | None = None) -> RenderableType:
    """Tables of all groups, and of the GPUs if NVML is installed."""
    tables = [_table(group) for group in facts(now, before)["groups"]]
    if not tables:
        return Text("no such ranks of this user run on this host")
    return Group(*tables, _gpus(now)) if now.gpus else Group(*tables)


def _group(ranks: list[FlightRecord], now: Sample, before: Sample | None) -> dict[str, Any]:
    earlier = {(one.id, one.rank): one for one in before.flight_records} if before else {}
    states = state_of(now)
    rows = []
    for one in ranks:
        then = earlier.get((one.id, one.rank))
        since = before.at_ns if before and then else one.steady_ns
        seconds = max((now.at_ns - since) / 1e9, 1e-9)
        sent = one.bytes_written - (then.bytes_written if then else 0)
        waited = (one.waited - (then.waited if then else 0)) / 1e9
        rows.append(
            {
                "rank": one.rank,
                "pid": one.pid,
                "calls_per_s": (one.begun - (then.begun if then else 0)) / seconds,
                "sent_mb_per_s": sent / seconds / 1e6,
                "waiting_percent": 100 * waited / seconds,
                "state": states[one.id, one.rank],
                "call": _activity(one, now.at_ns),
            }
        )
    first = ranks[0]
    return {"name": first.name, "size": first.size, "program": program(first), "ranks": rows}


def _table(group: dict[str, Any]) -> Table:
    rows, size = group["ranks"], group["size"]
    here = "" if len(rows) == size else f", {len(rows)} of them here"
    title = f'group "{group["name"]}", {size} ranks{here}: {group["program"]}'
    columns = dict.fromkeys(("rank", "pid", "calls/s", "MB/s sent", "waiting", ""), ">")
    table = Table(columns | {"current call": ""}, title, HEAVY_HEAD, optional=("MB/s sent", "pid"))
    for row in rows:
        table.add(
            *(str(row["rank"]), str(row["pid"]), f"{row['calls_per_s']:,.0f}"),
            *(f"{row['sent_mb_per_s']:,.1f}", f"{row['waiting_percent']:.0f} %"),
            *(Text(row["state"], STYLES.get(row["state"], "")), row["call"]),
        )
    return table


def _gpus(now: Sample) -> Table:
    columns = dict.fromkeys(("GPU", "busy", "memory", "pids of ranks"), ">")
    table = Table(
        columns | {"model": ""}, "GPUs of this host", HEAVY_HEAD, optional=("pids of ranks",)
    )
    ranks = {one.pid for one in now.flight_records}
    for gpu in now.gpus:
        used, total = gpu.memory or (0, 0)
        table.add(
            str(gpu.index),
            "" if gpu.busy_percent is None else f"{gpu.busy_percent} %",
            f"{used / 2**30:.1f} of {total / 2**30:.1f} GiB" if gpu.memory else "",
            ", ".join(map(str, sorted(gpu.pids & ranks))),
            f"{gpu.name}, {gpu.bus_id}",
        )
    return table


def _activity(one: FlightRecord, at_ns: int) -> str:
    if one.reason:
        return one.reason
    if not len(one.records):
        return "has not called yet"
    last = one.records[-1]
    if one.is_inside():
        return f"{flight_recorder.title(last)} for {_span(at_ns - int(last['begun']))}"
    outside_s = _span(at_ns - int(last["ended"]))
    return f"outside of calls for {outside_s}, after {flight_recorder.title(last)}"


def _span(nanoseconds: int) -> str:
    seconds: Any = max(nanoseconds, 0) / 1e9
    return f"{seconds:.1f} s" if seconds >= 1 else f"{seconds * 1e3:.1f} ms"


def main(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit status."""
    if options.svg and not options.once:
        raise InvalidArgument("--svg needs --once")
    console = Console(record=True, width=SVG_WIDTH) if options.svg else Console()

    def sample() -> Sample:
        return Sample(options.group, options.program)

    if options.textfile or options.listen is not None:
        where = options.textfile, options.listen
        return prometheus.export(sample, *where, options.every, options.once)

    def show(now: Sample, before: Sample | None = None) -> None:
        if options.json:
            print(json.dumps(facts(now, before)), flush=True)
        else:
            console.print(view(now, before))

    before = sample()
    if options.once:
        show(before)
        if options.svg:
            console.save_svg(options.svg, title="pycomm top")
        return 0
    live = contextlib.nullcontext() if options.json else Live(view(before), console=console)
    with live, contextlib.suppress(KeyboardInterrupt):  # Ctrl-C ends the display
        while True:
            time.sleep(options.every)  # the refresh interval
            now = sample()
            if isinstance(live, Live):
                live.update(view(now, before))
            else:
                show(now, before)
            before = now
    return 0
