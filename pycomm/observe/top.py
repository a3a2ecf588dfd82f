"""`pycomm top`: shows what the ranks of this host do, and refreshes.

Reads the flight recorder in each rank's memory: the ranks are not involved or
slowed down, and stopped ranks are shown as well. Ranks of other users are not shown.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.box import HEAVY_HEAD
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from pycomm import _command_line
from pycomm._tables import Table
from pycomm.observe import flight_recorder, gpus
from pycomm.observe.flight_recorder import FlightRecord

SVG_WIDTH = 110  # characters
LATE_S = 1.0  # after this time a rank that others wait for is marked as late


class Sample:
    """The flight records and GPUs at one instant; `at_ns` is the host's steady clock, as in the
    records."""

    def __init__(self) -> None:
        self.flight_records = flight_recorder.running()
        self.gpus = gpus.running()
        self.at_ns = time.monotonic_ns()


def view(now: Sample, before: Sample | None = None) -> RenderableType:
    """Tables of all groups, and of the GPUs if NVML is installed; rates are since `before`, or
    since the group was formed."""
    groups = flight_recorder.groups_of(now.flight_records)
    if not groups:
        return Text("no ranks of this user run on this host")
    tables = [_group(ranks, now, before) for ranks in groups]
    return Group(*tables, _gpus(now)) if now.gpus else Group(*tables)


def _group(ranks: list[FlightRecord], now: Sample, before: Sample | None) -> Table:
    first = ranks[0]
    here = "" if len(ranks) == first.size else f", {len(ranks)} of them here"
    title = f'group "{first.name}", {first.size} ranks{here}'
    columns = dict.fromkeys(("rank", "pid", "calls/s", "MB/s sent", "waiting", ""), ">")
    table = Table(columns | {"current call": ""}, title, HEAVY_HEAD)
    earlier = {(one.id, one.rank): one for one in before.flight_records} if before else {}
    most = max(_progress(one) for one in ranks)
    for one in ranks:
        then = earlier.get((one.id, one.rank))
        since = before.at_ns if before and then else one.steady_ns
        seconds = max((now.at_ns - since) / 1e9, 1e-9)
        calls = one.begun - (then.begun if then else 0)
        sent = one.bytes_written - (then.bytes_written if then else 0)
        waited = (one.waited - (then.waited if then else 0)) / 1e9
        table.add(
            *(str(one.rank), str(one.pid), f"{calls / seconds:,.0f}"),
            *(f"{sent / seconds / 1e6:,.1f}", f"{100 * waited / seconds:.0f} %"),
            _mark(one, most, now.at_ns),
            _activity(one, now.at_ns),
        )
    return table


def _gpus(now: Sample) -> Table:
    columns = dict.fromkeys(("GPU", "busy", "memory", "pids of ranks"), ">")
    table = Table(columns | {"model": ""}, "GPUs of this host", HEAVY_HEAD)
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


def _progress(one: FlightRecord) -> tuple[int, int, bool]:
    """A rank's progress: epoch and sequence of its last call, and whether it is complete."""
    if not len(one.records):
        return -1, -1, False
    last = one.records[-1]
    return int(last["epoch"]), int(last["sequence"]), not one.is_inside()


def _mark(one: FlightRecord, most: tuple[int, int, bool], at_ns: int) -> Text:
    """A rank's problem, if any."""
    if one.reason:
        return Text("broken", "red")
    if _is_stopped(one):
        return Text("stopped", "red")
    behind = not one.is_inside() and _progress(one)[:2] < most[:2]
    if behind and (at_ns - int(one.records[-1]["ended"])) / 1e9 > LATE_S:
        return Text("late", "yellow")
    return Text("")


def _is_stopped(one: FlightRecord) -> bool:
    """Whether the process was stopped by a signal or a debugger."""
    with contextlib.suppress(OSError):  # it has ended
        stat = Path(*Path(one.source).parts[:3], "stat").read_text()
        return stat.rpartition(")")[2].split()[0] in "Tt"
    return False


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


def main(argv: Sequence[str]) -> int:
    """Runs the command; returns its exit status."""
    parser = _command_line.parser("top", __doc__)
    parser.add_argument("--once", action="store_true", help="print one table and exit")
    parser.add_argument("--svg", metavar="FILE", help="with --once: draw the table to FILE")
    parser.add_argument(
        "--every", type=float, default=1.0, metavar="S", help="interval in seconds (1)"
    )
    flags = parser.parse_args(argv)
    if not flags.every > 0:
        parser.error(f"invalid --every: got {flags.every}, expected more than 0 seconds")
    if flags.svg and not flags.once:
        parser.error("--svg needs --once")
    console = Console(record=True, width=SVG_WIDTH) if flags.svg else Console()
    before = Sample()
    if flags.once:
        console.print(view(before))
        if flags.svg:
            console.save_svg(flags.svg, title="pycomm top")
        return 0
    # Ctrl-C ends the display.
    with Live(view(before), console=console) as live, contextlib.suppress(KeyboardInterrupt):
        while True:
            time.sleep(flags.every)  # the refresh interval
            now = Sample()
            live.update(view(now, before))
            before = now
    return 0
