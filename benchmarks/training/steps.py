"""`pycomm bench links --training`: seconds of a training step between hosts, over links of a rate.

The gradient has the size of FasterRCNN's, 41 M elements or 165 MB of float32, in 20 equal layers;
forward and backward are real products of matrices, of as many rows as take `--compute-s` where no
rank waits for another. Hosts are network namespaces behind `tc tbf` (netns.py of
pycomm.bench.support), "none" as fast as the kernel is. Without root, or with --throttle, ranks of
one host use token buckets in pycomm's transport instead (testing/rate_limited.h), and the table
says so. The ways to train run one after another:

    compute   no communication: what every rank does by itself, all at the same time
    dense     one sum of all gradients behind the backward pass
    overlap   pycomm.DataParallel: sums during the backward pass
    dgc       DGC at 99.9 %, raw packets, fused
    compact   the same with 2-bit values, exchange="auto"
    auto_time the same, exchange="auto_time"
    local     LocalSGD, models averaged every 8 steps
    adamw     as overlap, with AdamW; the ways above have SGD with momentum
    quantize  AdamW, gradients at 3 bits and sums at 8 bits; quantize_3_3: both at 3 bits
    topk      AdamW, updates at a ratio of 200; topk_32, topk_50 and topk_500: at that ratio
    topk_50_every_5 and topk_50_every_30: the same, an exchange every 5 or 30 steps
    quantized_updates: AdamW, all updates at 1 bit, both ways

Muon and SOAP have no ways of their own: they send what AdamW sends, and their arithmetic, here for
the processor, would hide the exchange.

A figure is the slowest rank's median step, the mean where steps differ; Paddle's ratio is what its
page of DGC gives. The table also has the estimate of `pycomm plan` (pycomm/tuning/planner.py) for
that link, from the step without communication and the kernels as measured here. With --json an
interrupted run continues.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from matplotlib.axes import Axes
from torch import nn

import pycomm
from benchmarks.support import command
from benchmarks.support.command import UNSHAPED, bytes_s
from pycomm import collectives
from pycomm._tables import Table
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.peers import OURS
from pycomm.bench.support import machine, plots, processes, summaries
from pycomm.bench.support.netns import Network, missing
from pycomm.compress.cost_model import Coding, measure_coding
from pycomm.testing import run_ranks
from pycomm.tuning import planner

LAYERS = 20
PADDLE = {"1gbit": 6.533, "10gbit": 1.467, "100gbit": 0.993}
EVERY = 8  # steps between the sums of LocalSGD
# Steps of a round, by way; with other ways each step is the same.
ROUNDS = {"local": EVERY} | {f"topk_50_every_{k}": k for k in (5, 30)}
SPARSITY = 0.999
# The planner's names of the ways.
PLANNED = {"dense": "dense", "dgc": "dgc gather", "compact": "dgc 2bit gather"}
PLANNED |= {"local": f"local {EVERY}"}
ONE_BUCKET_MB = 1 << 20
BUCKET = "token bucket in the transport"
FIRST = 2  # steps that are not counted
LINE_WITHIN = 0.1  # of its rate
LIMIT_S = 600  # of a call, against hangs


Wrapped = tuple[nn.Module, torch.optim.Optimizer | pycomm.LocalSGD]
"""A module, and what ends a step."""


def _dgc(model: nn.Module, options: dict[str, object]) -> Wrapped:
    optimizer = _sgd(model)
    dgc = pycomm.DGC(optimizer, sparsity=[SPARSITY], fused=True, **options)  # type: ignore[arg-type]  # of several types
    return pycomm.DataParallel(model, compression=dgc), optimizer


def _updates(
    model: nn.Module, compression: pycomm.TopK | pycomm.Quantize, k_steps: int = 1
) -> Wrapped:
    return model, pycomm.LocalSGD(model, _adamw(model, 0.0), k_steps, compression=compression)


def _topk(model: nn.Module, ratio: float, k_steps: int = 1) -> Wrapped:
    return _updates(model, pycomm.TopK(ratio=ratio), k_steps)


def _gradients(model: nn.Module, compression: pycomm.Quantize | None = None) -> Wrapped:
    return pycomm.DataParallel(model, compression=compression), _adamw(model)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)


def _adamw(model: nn.Module, beta: float = 0.9) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-6, (beta, 0.99), weight_decay=0.0)


WAYS: dict[str, Callable[[nn.Module], Wrapped]] = {
    "compute": lambda model: (model, _sgd(model)),
    "dense": lambda model: (pycomm.DataParallel(model, bucket_mb=ONE_BUCKET_MB), _sgd(model)),
    "overlap": lambda model: (pycomm.DataParallel(model), _sgd(model)),
    "dgc": lambda model: _dgc(model, {}),
    "compact": lambda model: _dgc(model, {"value_dtype": "2bit"}),
    "auto_time": lambda model: _dgc(model, {"value_dtype": "2bit", "exchange": "auto_time"}),
    "local": lambda model: (model, pycomm.LocalSGD(model, _sgd(model), EVERY)),
    "adamw": _gradients,
    "quantize": lambda model: _gradients(model, pycomm.Quantize()),
    "quantize_3_3": lambda model: _gradients(model, pycomm.Quantize(3, 3)),
    "topk": lambda model: _topk(model, 200),
    "topk_32": lambda model: _topk(model, 32),
    "topk_50": lambda model: _topk(model, 50),
    "topk_500": lambda model: _topk(model, 500),
    "topk_50_every_5": lambda model: _topk(model, 50, 5),
    "topk_50_every_30": lambda model: _topk(model, 50, 30),
    "quantized_updates": lambda model: _updates(model, pycomm.Quantize(1, 1)),
}


@dataclass(frozen=True)
class Row:
    """One way over one link."""

    rate: str
    way: str
    step_s: float  # of the slowest rank
    over_compute_percent: float
    ratio: float  # times faster than overlap
    expected_s: float | None = None  # by the planner; None: it has no such link or way
    line_of_rate: float | None = None  # of a token bucket: counted bytes a second over its rate


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status: 2 if hosts are impossible here."""
    counts: dict[str, Any] = {"hosts": (2, ""), "steps": (8, "of a way; 1 where it takes seconds")}
    counts |= {"width": (1432, "of a layer"), "compute_s": (0.3725, "a step's")}
    parser = command.parser("links --training", __doc__, "seconds per step", **counts)
    usual = "100mbit,1gbit,10gbit,none"
    parser.add_argument("--rates", type=command.rates, default=usual, help="(%(default)s)")
    command.add_names(parser, "ways", WAYS, WAYS)
    parser.add_argument("--throttle", action="store_true", help="token buckets, not tc")
    options = parser.parse_args(argv)
    if not {"compute", "overlap"} <= {*options.ways}:
        parser.error("--ways needs compute and overlap")
    if not options.throttle and (why := missing()):
        command.CONSOLE.print(f"tc {why}: each line is a {BUCKET}")
        options.throttle = True
    settings = command.chosen(options, "hosts", "steps", "compute_s")
    settings |= {"elements": LAYERS * options.width**2, "ways": options.ways}
    if options.throttle:
        settings["lines"] = BUCKET
    found = stored(options.json, settings)
    rates = [rate for rate in options.rates if all(row.rate != rate for row in found)]
    with command.bar() as bar:
        task = bar.add_task("", total=len(rates) * len(options.ways))
        for rate in rates:
            bar.update(task, description=rate)
            found += measure(rate, options, lambda: bar.advance(task))
            rows = [asdict(row) for row in found]
            summaries.store(options.json, settings=settings, rows=rows)
    command.CONSOLE.print(table(found, BUCKET if options.throttle else ""))
    if options.plot:
        hosts = f"{options.hosts} ranks, {BUCKET}" if options.throttle else f"{options.hosts} hosts"
        draw(options.plot, found, f"{hosts}, {machine.caption()}")
    return 0


def stored(path: Path | None, settings: dict[str, object]) -> list[Row]:
    """The rows of an interrupted run with the same settings."""
    if path is None or not path.exists():
        return []
    content = summaries.read(path)
    return [Row(**row) for row in content["rows"]] if content["settings"] == settings else []


def measure(rate: str, options: argparse.Namespace, advance: Callable[[], object]) -> list[Row]:
    """The rows of one link."""
    took: dict[str, list[float]] = {}
    codings: list[tuple[Coding, Coding]] = []
    speed = None if rate == UNSHAPED else bytes_s(rate)

    def on_message(rank: int, message: tuple[str, float] | tuple[Coding, Coding]) -> None:
        if isinstance(message[0], Coding):
            codings.append(message)
            return
        way, seconds = message
        took.setdefault(way, []).append(seconds)
        if rank == 0:
            advance()

    args = (options.ways, options.steps, options.width, options.compute_s)
    if options.throttle:
        limits: dict[str, Any] = {"timeout_s": LIMIT_S, "link_bytes_per_s": speed}
        limits |= {"transport": "tcp", "processes": True}
        for rank, messages in enumerate(
            run_ranks(options.hosts, throttled, speed, *args, **limits)
        ):
            for one in messages:
                on_message(rank, one)
    else:
        with Network(options.hosts, ipv6=False) as net:
            if rate != UNSHAPED:
                net.shape(0, rate)
            hosts = [host.name for host in net.hosts]
            processes.run(work, args, options.hosts, on_message, hosts)
    slowest = {way: max(took[way]) for way in options.ways}
    line = max(took["line"]) / speed if "line" in took and speed else None
    expected: dict[str, float] = {}
    if rate != UNSHAPED:
        where = options.hosts, bytes_s(rate) * 8e-9  # in Gbit/s
        loads = planner.loads_of(LAYERS * options.width**2, SPARSITY)
        expected = planner.expected(slowest["compute"], loads, codings[0], where, EVERY)
    return [
        Row(
            rate=rate,
            way=way,
            step_s=seconds,
            over_compute_percent=100 * (seconds / slowest["compute"] - 1),
            ratio=slowest["overlap"] / seconds,
            expected_s=expected.get(PLANNED.get(way, "")),
            line_of_rate=line,
        )
        for way, seconds in slowest.items()
    ]


def work(rank: processes.Rank, *args: Any) -> None:
    """A rank on its own host."""
    Groups([OURS["pycomm"]], rank.store, rank.rank, rank.size)
    measured(rank.send, *args)


def throttled(group: pycomm.Group, speed: float | None, *args: Any) -> list[Any]:
    """A rank behind a token bucket: its reports, and the rate of its link."""
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // group.size))
    messages: list[Any] = [("line", line_speed(group, speed))] if speed else []
    measured(messages.append, *args)
    return messages


def line_speed(group: pycomm.Group, speed: float) -> float:
    """Bytes a second that this rank writes in sums of about a second altogether, headers counted;
    the first has emptied the bucket."""
    x = torch.zeros(int(speed / 4 / 8))
    collectives.all_reduce(x, group=group)
    before, start = group.stats(), time.perf_counter()
    for _ in range(8):
        collectives.all_reduce(x, group=group)
    seconds = time.perf_counter() - start
    return float(group.stats().bytes_written - before.bytes_written) / seconds


def measured(
    send: Callable[[object], None], ways: list[str], steps: int, width: int, compute_s: float
) -> None:
    """Reports the coding rate of this rank, all ranks at once, and (way, seconds of a step)."""
    raw, compact = planner.loads_of(LAYERS * width**2, SPARSITY)
    collectives.barrier()
    send((measure_coding(raw), measure_coding(compact)))
    rows = rows_of(compute_s, width)
    for way in ways:
        send((way, seconds_of(way, (rows, width), steps)))


def rows_of(compute_s: float, width: int) -> int:
    """Collective: how many rows make a step without communication take so long, all at once."""
    rows = 32
    for _ in range(2):  # the second time close to the result
        rows = max(1, round(rows * compute_s / seconds_of("compute", (rows, width), 3)))
        count = torch.tensor([rows])
        rows = int(collectives.broadcast(count, 0)[0])
    return rows


def seconds_of(way: str, shape: tuple[int, int], steps: int) -> float:
    """The median of `steps` steps of a new model, of one where they are long; the mean of whole
    rounds where steps differ."""
    torch.manual_seed(0)
    layers = [nn.Linear(shape[1], shape[1], bias=False) for _ in range(LAYERS)]
    model, steps_of = WAYS[way](nn.Sequential(*layers))
    x = torch.randn(shape)

    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()
        steps_of.step()

    for _ in range(FIRST):
        collectives.barrier()
        start = time.perf_counter()
        step()
    last = torch.tensor([time.perf_counter() - start])
    long = float(collectives.all_reduce(last, "max")) > 2  # seconds
    count = 1 if long else steps
    if way in ROUNDS:  # each with one exchange
        count = ROUNDS[way] * -(-steps // ROUNDS[way])
    seconds = []
    for _ in range(count):
        collectives.barrier()
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    return statistics.mean(seconds) if way in ROUNDS else statistics.median(seconds)


def table(found: Sequence[Row], lines: str = "") -> Table:
    """Seconds per step, a column for each link and one for what the planner expects, if it does;
    the ratio of overlap to DGC, and Paddle's. `lines` says what the links are, where not tc's."""
    title = "seconds per step" + (f", each link a {lines}" if lines else "")
    ways = list(dict.fromkeys(row.way for row in found))
    columns: dict[str, list[str]] = {}
    for rate in dict.fromkeys(row.rate for row in found):
        own = {row.way: row for row in found if row.rate == rate}
        share = next(iter(own.values())).line_of_rate
        ratio = f"{own['dgc'].ratio:.2f}x" if "dgc" in own else "-"
        paddle = f"{PADDLE[rate]}x" if rate in PADDLE else "-"
        columns[rate] = [f"{own[way].step_s:.3f}" for way in ways] + [ratio, paddle]
        if share is not None:
            holds = "" if abs(share - 1) <= LINE_WITHIN else ": outside of the tolerance"
            columns[rate].append(f"{100 * share:.0f} %{holds}")
        planned = [own[way].expected_s for way in ways]
        if any(planned):
            columns[f"{rate} planned"] = ["" if s is None else f"{s:.3f}" for s in planned]
    names = [*ways, "overlap/dgc", "Paddle's", "measured rate"]
    shown = Table({"way": "<"} | dict.fromkeys(columns, ">"), title)
    names = names[: max(map(len, columns.values()))]
    for row in itertools.zip_longest(names, *columns.values(), fillvalue=""):
        shown.add(*row)
    return shown


def draw(path: Path, found: Sequence[Row], caption: str) -> None:
    """Bars of seconds per step, a panel for each line."""
    panels = plots.grouped(found, lambda row: f"{plots.rate(row.rate)}, seconds", _panel)
    best = max((row for row in found if row.way != "compute"), key=lambda row: row.ratio)
    title = f"A step with {plots.LABELS.get(best.way, best.way)} is {best.ratio:.3g} times as fast "
    title += f"over {plots.rate(best.rate)}"
    plots.save(path, panels, title, f"41 M parameters, {caption}", 2.3, columns=2)


def _panel(own: Sequence[Row], axes: Axes) -> None:
    lengths = {row.way: row.step_s for row in own}
    plots.bars(axes, lengths, [f"{row.step_s:.2f}" for row in own])
