"""`python -m benchmarks links`: collectives between hosts, over links of a given rate.

Hosts are network namespaces of this machine (pycomm.bench.support.netns), joined by veth and held
to a rate by `tc tbf`; "none" leaves them as fast as the kernel is. At each rate fresh ranks
(link_rank.py) hold a group of every contestant, check every case and take turns. Needs root.

    bytes       that a host must send in a case: S times nccl-tests' bus factor for hosts
    % of link   bytes / time, of the rate
    CPU s/GB    processor seconds of all ranks of a host, the kernel's among them, / bytes (10^9)

`--peers sockets` is no contestant but a bound: the same bytes through plain sockets (sockets.py).
`--peers pycomm,pycomm-encrypted` compares `Options(encrypt=True)` with plain connections. With
LD_LIBRARY_PATH=DIR the libcrypto.so.3 of DIR encrypts.
`--delay 50ms --loss 0.1` adds 50 ms one way and drops 0.1 % of the packets in each direction, by a
forwarding process instead of tc (benchmarks.support.delayed_link). `--pauses 0,1` repeats each
case with 1 s without traffic before each call, as during a computation. `--sysctl NAME=VALUE`
applies to all hosts, such as the largest windows of TCP.
With --training it measures training steps instead, with other options
(benchmarks/training/steps.py).
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import re
import secrets
import ssl
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any
from unittest import mock

from matplotlib.axes import Axes

from benchmarks.collectives import link_rank, sockets
from benchmarks.collectives.link_rank import RankTimes, Request
from benchmarks.support import command, delayed_link
from benchmarks.support.command import CONSOLE, UNSHAPED, bytes_s
from benchmarks.support.delayed_link import DelayedLink, LinkSettings
from benchmarks.training import steps
from pycomm._command_line import numbers
from pycomm._tables import Table
from pycomm.bench.collectives import table, worker
from pycomm.bench.collectives.cases import VERBS
from pycomm.bench.collectives.peers import ENCRYPTED
from pycomm.bench.support import machine, plots, processes, summaries
from pycomm.bench.support.netns import Network, missing
from pycomm.bench.support.sizes import format_size, parse_sizes

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
SHARES = numbers(float, lambda n: n >= 0, "at least 0")
NEITHER = LinkSettings()  # delay nor loss
CONTESTANTS = ["pycomm", "pycomm-direct", ENCRYPTED.name, "gloo", sockets.NAME]


@dataclass(frozen=True)
class Row:
    """One contestant in one case; times are the slowest rank's medians, a GB is 10^9 bytes."""

    rate: str
    delay_ms: float  # one way
    loss_percent: float
    pause_s: float  # before each call
    verb: str
    size_bytes: int
    peer: str
    time_ms: float
    bandwidth_gbs: float  # of the bytes that a host must send
    line_percent: float | None  # None if the link has no rate
    ratio: float | None  # times faster than gloo; None without it
    cpu_s_per_gb: float
    wrong: int
    worst_ms: float  # the largest median of a round, of any rank
    rounds: int


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status: 2 if hosts are impossible here."""
    if "--training" in argv:
        return steps.main([word for word in argv if word != "--training"])
    parser = _parser()
    options = parser.parse_args(argv)
    counts = len(options.peers), len(options.ops), options.ranks_per_host, options.rounds
    if options.hosts < 2 or min(counts) < 1:
        parser.error("at least 2 hosts, and 1 rank on each, peer, op and round are needed")
    if options.ranks_per_host > 1 and sockets.NAME in options.peers:
        parser.error(f"--peers {sockets.NAME} is for one rank on each host")
    if bad := [word for word in options.sysctl if "=" not in word]:
        parser.error(f"--sysctl takes NAME=VALUE, not {', '.join(bad)}")
    if why := delayed_link.missing() if options.delay or any(options.loss) else missing():
        print(f"pycomm bench links {why}", file=sys.stderr)
        return 2
    found: list[Row] = []
    with command.bar() as bar:
        cases = len(options.ops) * len(options.sizes) * len(options.pauses)
        task = bar.add_task("", total=cases * len(options.rates) * len(options.loss))
        shown = Table(COLUMNS)

        def show(rows: list[Row]) -> None:
            found.extend(rows)
            for row in rows:
                add(shown, row)
            shown.flush(CONSOLE)
            bar.advance(task)

        for rate, loss in itertools.product(options.rates, options.loss):
            bar.update(task, description=rate)
            measure(rate, loss, options, show)
    _store(found, options)
    return 1 if any(row.wrong for row in found) else 0


def _parser() -> argparse.ArgumentParser:
    counts: dict[str, Any] = {"hosts": (2, ""), "ranks_per_host": (1, "")}
    counts |= {"rounds": (5, "turns of each contestant"), "mtu": (1500, "with delay or loss")}
    parser = command.parser("links", __doc__, "bandwidth over size", **counts)
    usual = "1gbit,10gbit,none"
    parser.add_argument("--rates", type=command.rates, default=usual, help="(%(default)s)")
    parser.add_argument("--sizes", type=parse_sizes, default="1M:64M:4", help="(%(default)s)")
    command.add_names(parser, "ops", VERBS, ["all_reduce"])
    command.add_names(parser, "peers", CONTESTANTS, ["pycomm", "gloo"])
    parser.add_argument("--delay", type=_seconds, default=0.0, help="one way, such as 50ms")
    parser.add_argument("--loss", type=SHARES, default=[0.0], help="percent, such as 0,0.1")
    parser.add_argument("--pauses", type=SHARES, default=[0.0], help="seconds before each call")
    parser.add_argument("--sysctl", action="append", default=[], help="NAME=VALUE, of all hosts")
    return parser


def _seconds(text: str) -> float:
    """The value of a duration such as "50ms"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 50ms")
    return float(match[1]) * SECONDS[match[2]]


@contextlib.contextmanager
def _network(rate: str, link: LinkSettings, options: argparse.Namespace) -> Iterator[Network]:
    """The hosts, with links of tc's if there is neither delay nor loss."""
    delayed = link.delay_s > 0 or link.loss > 0
    with contextlib.ExitStack() as ending:
        net = ending.enter_context(Network(options.hosts, links=int(not delayed), ipv6=False))
        for host in net.hosts:
            for setting in options.sysctl:
                host.run("sysctl", "-q", "-w", setting)
        if delayed:
            ending.enter_context(DelayedLink(net.hosts, options.mtu)).set(link)
        elif rate != UNSHAPED:
            net.shape(0, rate)
        yield net


def measure(
    rate: str, loss: float, options: argparse.Namespace, show: Callable[[list[Row]], object]
) -> None:
    """Shows the rows of each case at one rate and loss, as soon as all ranks have reported."""
    size = options.hosts * options.ranks_per_host
    cases = [
        (verb, size_bytes, max(1, min(5 if pause_s else 20, 2**26 // size_bytes)), pause_s)
        for verb in options.ops
        for size_bytes in options.sizes
        for pause_s in options.pauses
    ]
    limit = 0.0 if rate == UNSHAPED else bytes_s(rate)
    link = LinkSettings(options.delay, limit, loss / 100)
    on_message = command.by_case(size, lambda by: show(rows_of(rate, options.hosts, by, link)))
    secret = mock.patch.dict(os.environ, PYCOMM_SECRET=secrets.token_hex(32))  # of the ranks
    with secret, _network(rate, link, options) as net, worker.barrier_file(size) as flags:
        hosts = [net.hosts[rank // options.ranks_per_host] for rank in range(size)]
        addresses = [host.ipv4() for host in hosts]
        request = Request(
            *(flags, addresses, options.peers, cases, options.rounds),
            far=options.delay > 0,
        )
        processes.run(link_rank.work, (request,), size, on_message, [host.name for host in hosts])


def rows_of(
    rate: str, hosts: int, by_rank: Sequence[RankTimes], link: LinkSettings = NEITHER
) -> list[Row]:
    """The rows of one case, from the reports of all ranks."""
    first = by_rank[0]
    sent = first.size_bytes * VERBS[first.verb].bus_factor(hosts)
    rows = []
    for name in first.seconds:
        time_s = max(table.typical(one.seconds[name]) for one in by_rank)
        cpu_s = sum(table.typical(one.cpu_s[name]) for one in by_rank)
        rows.append(
            Row(
                rate=rate,
                delay_ms=link.delay_s * 1e3,
                loss_percent=link.loss * 100,
                pause_s=first.pause_s,
                verb=first.verb,
                size_bytes=first.size_bytes,
                peer=name,
                time_ms=time_s * 1e3,
                bandwidth_gbs=sent / time_s / 1e9,
                line_percent=None if rate == UNSHAPED else 100 * sent / time_s / bytes_s(rate),
                ratio=None,
                cpu_s_per_gb=cpu_s / hosts / sent * 1e9,
                wrong=sum(one.wrong[name] for one in by_rank),
                worst_ms=1e3
                * max(statistics.median(calls) for one in by_rank for calls in one.seconds[name]),
                rounds=len(first.seconds[name]),
            )
        )
    gloo = next((row.time_ms for row in rows if row.peer == "gloo"), None)
    return [replace(row, ratio=gloo / row.time_ms if gloo else None) for row in rows]


COLUMNS = {"# rate": "<8", "delay": ">5", "loss": ">5", "pause": ">5", "verb": ">10", "size": ">5"}
COLUMNS |= {"peer": ">13", "time (ms)": "10.3f", "GB/s": "6.3f", "% of link": ".1f"}
COLUMNS |= {"vs gloo": ">7", "CPU s/GB": ".2f", "#wrong": ">6"}


def add(to: Table, row: Row) -> None:
    """Adds a row to a table of COLUMNS."""
    link = f"{row.delay_ms:g}ms", f"{row.loss_percent:g}%", f"{row.pause_s:g}s"
    ratio = None if row.ratio is None else f"{row.ratio:.2f}x"
    to.add(
        *(row.rate, *link, row.verb, format_size(row.size_bytes), row.peer, row.time_ms),
        *(row.bandwidth_gbs, row.line_percent, ratio, row.cpu_s_per_gb, str(row.wrong)),
    )


def _store(found: Sequence[Row], options: argparse.Namespace) -> None:
    names = ["hosts", "ranks_per_host", "rounds", "peers"]
    names += ["mtu"] if options.delay or any(options.loss) else []
    names += ["sysctl"] if options.sysctl else []
    settings = command.chosen(options, *names)
    if ENCRYPTED.name in options.peers:
        settings["openssl"] = ssl.OPENSSL_VERSION  # Python's ssl and pycomm load the same copy
    summaries.store(options.json, settings=settings, rows=[asdict(row) for row in found])
    if options.plot:
        shape = f"{options.hosts} hosts x {options.ranks_per_host} ranks"
        draw(options.plot, found, f"{shape}, {machine.caption()}")


def draw(path: Path, found: Sequence[Row], caption: str) -> None:
    """Bandwidth over size, a panel for each rate and verb, with the rate of the link."""
    panels = plots.grouped(found, lambda row: f"{row.verb}, {plots.rate(row.rate)}", _panel)
    ours = [row.line_percent for row in found if row.peer == "pycomm" and row.line_percent]
    title = "bandwidth over links"
    if ours:
        title = f"pycomm uses {min(ours):.0f} to {max(ours):.0f} % of the link"
    plots.save(path, panels, title, caption)


def _panel(own: Sequence[Row], axes: Axes) -> None:
    if own[0].rate != UNSHAPED:
        axes.axhline(bytes_s(own[0].rate) / 1e9, **plots.LIMIT)
    plots.byte_ticks(axes, [row.size_bytes for row in own])
    most = max(row.bandwidth_gbs for row in own)
    shown = {"ylabel": "GB/s of a host", "ylim": (0, 1.1 * most)}
    plots.lines(axes, own, ("peer", "size_bytes", "bandwidth_gbs"), **shown)
