"""`pycomm bench links --training`: seconds of a training step between hosts, over links of a rate.

The gradient has the size of FasterRCNN's, 41 M elements or 165 MB of float32, in 20 equal layers;
forward and backward are real products of matrices, of as many rows as take `--compute-s` where no
rank waits for another. Hosts are network namespaces behind `tc tbf` (netns.py of
pycomm.bench.support), "none" as fast as the kernel is. Needs root. The ways to train run one after
another:

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
import statistics
import sys
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
from pycomm.bench.support import plots, processes, summaries
from pycomm.bench.support.netns import Network, missing
from pycomm.compress.cost_model import Coding, measure_coding
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
FIRST = 2  # steps that are not counted


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


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns the exit status: 2 if hosts are impossible here."""
    counts: dict[str, Any] = {"hosts": (2, ""), "steps": (8, "of a way; 1 where it takes seconds")}
    counts |= {"width": (1432, "of a layer"), "compute_s": (0.3725, "a step's")}
    parser = command.parser("links --training", __doc__, **counts)
    usual = "100mbit,1gbit,10gbit,none"
    parser.add_argument("--rates", type=command.rates, default=usual, help="(%(default)s)")
    command.add_names(parser, "ways", WAYS, WAYS)
    options = parser.parse_args(argv)
    if not {"compute", "overlap"} <= {*options.ways}:
        parser.error("--ways needs compute and overlap")
    if why := missing():
        print(f"pycomm bench links --training {why}", file=sys.stderr)
        return 2
    settings = command.chosen(options, "hosts", "steps", "compute_s")
    settings |= {"elements": LAYERS * options.width**2, "ways": options.ways}
    found = stored(options.json, settings)
    rates = [rate for rate in options.rates if all(row.rate != rate for row in found)]
    with command.bar() as bar:
        task = bar.add_task("", total=len(rates) * len(options.ways))
        for rate in rates:
            bar.update(task, description=rate)
            found += measure(rate, options, lambda: bar.advance(task))
            rows = [asdict(row) for row in found]
            summaries.store(options.json, settings=settings, rows=rows)
    command.CONSOLE.print(table(found))
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

    def on_message(rank: int, message: tuple[str, float] | tuple[Coding, Coding]) -> None:
        if isinstance(message[0], Coding):
            codings.append(message)
            return
        way, seconds = message
        took.setdefault(way, []).append(seconds)
        if rank == 0:
            advance()

    args = (options.ways, options.steps, options.width, options.compute_s)
    with Network(options.hosts, ipv6=False) as net:
        if rate != UNSHAPED:
            net.shape(0, rate)
        processes.run(work, args, options.hosts, on_message, [host.name for host in net.hosts])
    slowest = {way: max(took[way]) for way in options.ways}
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
        )
        for way, seconds in slowest.items()
    ]


def work(rank: processes.Rank, ways: list[str], steps: int, width: int, compute_s: float) -> None:
    """Reports the coding rate of this rank, all ranks at once, and (way, seconds of a step)."""
    Groups([OURS["pycomm"]], rank.store, rank.rank, rank.size)
    raw, compact = planner.loads_of(LAYERS * width**2, SPARSITY)
    collectives.barrier()
    rank.send((measure_coding(raw), measure_coding(compact)))
    rows = rows_of(compute_s, width)
    for way in ways:
        rank.send((way, seconds_of(way, (rows, width), steps)))


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


def table(found: Sequence[Row]) -> Table:
    """Seconds per step, a column for each link and one for what the planner expects, if it does;
    the ratio of overlap to DGC, and Paddle's."""
    ways = list(dict.fromkeys(row.way for row in found))
    columns: dict[str, list[str]] = {}
    for rate in dict.fromkeys(row.rate for row in found):
        own = {row.way: row for row in found if row.rate == rate}
        ratio = f"{own['dgc'].ratio:.2f}x" if "dgc" in own else "-"
        paddle = f"{PADDLE[rate]}x" if rate in PADDLE else "-"
        columns[rate] = [f"{own[way].step_s:.3f}" for way in ways] + [ratio, paddle]
        planned = [own[way].expected_s for way in ways]
        if any(planned):
            columns[f"{rate} planned"] = ["" if s is None else f"{s:.3f}" for s in planned]
    shown = Table({"way": "<"} | dict.fromkeys(columns, ">"), "seconds per step")
    names = [*ways, "overlap/dgc", "Paddle's"]
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
