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
import json
import re
import secrets
import ssl
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from benchmarks.collectives import sockets
from benchmarks.collectives.link_rank import Orders, RankTimes
from benchmarks.support import command, delayed_link
from benchmarks.support.command import CONSOLE, UNSHAPED, bytes_s
from benchmarks.support.delayed_link import DelayedLink, LinkSettings
from benchmarks.training import steps
from pycomm.bench.collectives import table, worker
from pycomm.bench.collectives.peers import ENCRYPTED
from pycomm.bench.collectives.plot import COLORS
from pycomm.bench.collectives.verbs import VERBS
from pycomm.bench.support import machine
from pycomm.bench.support.netns import Network, missing
from pycomm.bench.support.sizes import format_size, names, parse_sizes

SECONDS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
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
    try:
        with command.bar() as bar:
            cases = len(options.ops) * len(options.sizes) * len(options.pauses)
            task = bar.add_task("", total=cases * len(options.rates) * len(options.loss))
            CONSOLE.print(HEADER)
            for rate, loss in itertools.product(options.rates, options.loss):
                bar.update(task, description=rate)
                for rows in measure(rate, loss, options):
                    found += rows
                    for row in rows:
                        CONSOLE.print(text(row))
                    bar.advance(task)
    except RuntimeError as error:
        CONSOLE.print(str(error), style="red", markup=False)
        return 1
    except KeyboardInterrupt:
        CONSOLE.print("interrupted")
        return 130
    _store(found, options)
    return 1 if any(row.wrong for row in found) else 0


def _parser() -> argparse.ArgumentParser:
    parser = command.parser("links", __doc__, plot="bandwidth over size")
    parser.add_argument("--hosts", type=int, default=2)
    parser.add_argument("--ranks-per-host", type=int, default=1)
    usual = "1gbit,10gbit,none"
    parser.add_argument("--rates", type=command.rates, default=usual, help="(%(default)s)")
    parser.add_argument("--sizes", type=parse_sizes, default="1M:64M:4", help="(%(default)s)")
    verbs, peers = ",".join(VERBS), ",".join(CONTESTANTS)
    parser.add_argument("--ops", type=names(VERBS), default="all_reduce", help=verbs)
    parser.add_argument("--peers", type=names(CONTESTANTS), default="pycomm,gloo", help=peers)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each contestant")
    parser.add_argument("--delay", type=_seconds, default=0.0, help="one way, such as 50ms")
    parser.add_argument("--loss", type=_numbers, default=[0.0], help="percent, such as 0,0.1")
    parser.add_argument("--mtu", type=int, default=1500, help="of links with delay or loss")
    parser.add_argument("--pauses", type=_numbers, default=[0.0], help="seconds before each call")
    parser.add_argument("--sysctl", action="append", default=[], help="NAME=VALUE, of all hosts")
    return parser


def _seconds(text: str) -> float:
    """The value of a duration such as "50ms"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)(s|ms|us)", text)
    if not match:
        raise argparse.ArgumentTypeError(f"{text!r} is no duration: write 50ms")
    return float(match[1]) * SECONDS[match[2]]


def _numbers(text: str) -> list[float]:
    """The numbers of a list such as "0,0.1"; none is negative."""
    numbers = [float(word) for word in text.split(",")]
    if min(numbers) < 0:
        raise argparse.ArgumentTypeError(f"{text!r} has a negative number")
    return numbers


@contextlib.contextmanager
def _network(rate: str, link: LinkSettings, options: argparse.Namespace) -> Iterator[Network]:
    """The hosts, with links of tc's if there is neither delay nor loss."""
    delayed = link.delay_s > 0 or link.loss > 0
    with (
        Network(options.hosts, links=0 if delayed else 1, ipv6=False) as net,
        contextlib.ExitStack() as ending,
    ):
        for host in net.hosts:
            for setting in options.sysctl:
                host.run("sysctl", "-q", "-w", setting)
        if delayed:
            ending.enter_context(DelayedLink(net.hosts, options.mtu)).set(link)
        elif rate != UNSHAPED:
            net.shape(0, rate)
        yield net


def measure(rate: str, loss: float, options: argparse.Namespace) -> Iterator[list[Row]]:
    """The rows of each case at one rate and loss, as soon as all ranks have reported.

    Raises RuntimeError if a rank failed; its output is on this process's stderr.
    """
    size = options.hosts * options.ranks_per_host
    cases = [
        (verb, size_bytes, max(1, min(5 if pause_s else 20, 2**26 // size_bytes)), pause_s)
        for verb in options.ops
        for size_bytes in options.sizes
        for pause_s in options.pauses
    ]
    limit = 0.0 if rate == UNSHAPED else bytes_s(rate)
    link = LinkSettings(options.delay, limit, loss / 100)
    with _network(rate, link, options) as net, tempfile.NamedTemporaryFile() as flags:
        flags.write(bytes(8 * size * worker.SLOT))
        flags.flush()
        ranks = []
        key = secrets.token_hex(32)
        for rank in range(size):
            host = net.hosts[rank // options.ranks_per_host]
            orders = Orders(
                *(rank, size, net.hosts[0].ipv4(), host.ipv4(), flags.name),
                *(options.peers, cases, options.rounds, options.delay > 0),
            )
            process = host.start(
                [sys.executable, "-m", "benchmarks.collectives.link_rank"],
                {"GLOO_SOCKET_IFNAME": "eth0", "PYCOMM_SECRET": key},
                stdin=subprocess.PIPE,
                stderr=None,
            )
            assert process.stdin is not None
            process.stdin.write(json.dumps(asdict(orders)) + "\n")
            process.stdin.flush()
            ranks.append(process)
        for _ in cases:
            yield rows_of(rate, options.hosts, [_receive(process) for process in ranks], link)


def _receive(process: subprocess.Popen[str]) -> RankTimes:
    assert process.stdout is not None
    if line := process.stdout.readline():
        return RankTimes(**json.loads(line))
    raise RuntimeError(f"a rank ended with exit status {process.wait()}; its output is above")


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


HEADER = (
    f"{'# rate':8} {'delay':>7} {'loss':>6} {'pause':>6} {'verb':>14} {'size':>6} "
    f"{'peer':>14} {'time (ms)':>10} {'GB/s':>6} {'% of link':>9} {'vs gloo':>8} "
    f"{'CPU s/GB':>8} {'#wrong':>6}"
)


def text(row: Row) -> str:
    """One line under HEADER."""
    line = "-" if row.line_percent is None else f"{row.line_percent:.1f}"
    ratio = "-" if row.ratio is None else f"{row.ratio:.2f}x"
    return (
        f"{row.rate:8} {row.delay_ms:>5g}ms {row.loss_percent:>5g}% {row.pause_s:>5g}s "
        f"{row.verb:>14} {format_size(row.size_bytes):>6} {row.peer:>14} "
        f"{row.time_ms:>10.3f} {row.bandwidth_gbs:>6.3f} {line:>9} {ratio:>8} "
        f"{row.cpu_s_per_gb:>8.2f} {row.wrong:>6}"
    )


def _store(found: Sequence[Row], options: argparse.Namespace) -> None:
    chosen = ["hosts", "ranks_per_host", "rounds", "peers"]
    chosen += ["mtu"] if options.delay or any(options.loss) else []
    chosen += ["sysctl"] if options.sysctl else []
    settings = {name: getattr(options, name) for name in chosen}
    if ENCRYPTED.name in options.peers:
        settings["openssl"] = ssl.OPENSSL_VERSION  # Python's ssl and pycomm load the same copy
    command.store(options.json, settings=settings, rows=[asdict(row) for row in found])
    if options.plot:
        where = machine.describe()
        shape = f"{options.hosts} hosts x {options.ranks_per_host} ranks"
        draw(options.plot, found, f"{shape}, {where['cpu']}, {where['cores']} cores")


def draw(path: Path, found: Sequence[Row], caption: str) -> None:
    """Bandwidth over size, a panel for each rate and verb, with the rate of the link."""
    panels = list(dict.fromkeys((row.rate, row.verb) for row in found))
    figure = Figure(figsize=(4.2 * len(panels), 3.8), layout="constrained")
    for axes, (rate, verb) in zip(
        figure.subplots(1, len(panels), squeeze=False).flat, panels, strict=True
    ):
        chosen = [row for row in found if (row.rate, row.verb) == (rate, verb)]
        for peer in dict.fromkeys(row.peer for row in chosen):
            own = [row for row in chosen if row.peer == peer]
            sizes, speeds = [r.size_bytes for r in own], [r.bandwidth_gbs for r in own]
            axes.plot(sizes, speeds, marker="o", ms=3.5, color=COLORS.get(peer), label=peer)
        if rate != UNSHAPED:
            axes.axhline(bytes_s(rate) / 1e9, ls="--", lw=1, color="#d93025", label="link rate")
        axes.set(xscale="log", xlabel="bytes", ylabel="GB/s of a host", title=f"{verb}, {rate}")
        axes.set_ylim(bottom=0)
        axes.set_xticks(sorted({row.size_bytes for row in chosen}), minor=False)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: format_size(int(x))))
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.legend(frameon=False)
    figure.suptitle(caption, fontsize=9, color="#5f6368")
    figure.savefig(path, dpi=150)
