"""`pycomm plan` and pycomm.plan(): predicts the time of a training step for other ranks and links.

`bench links --training` compares it with measurements.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn

from pycomm._arguments import function, integer, integers, number, numbers_in, refuse
from pycomm._command_line import RANKS, RATES_GBIT
from pycomm._tables import Table, console
from pycomm._training.arguments import check_module
from pycomm.compress.cost_model import Coding, Link, measure_coding, predicted
from pycomm.compress.schedule import Load, code_at, to_send
from pycomm.errors import InvalidArgument

CALL_S = 1e-4  # latency of a message between hosts
WARM, STEPS = 2, 5
NEAR = 1.02  # times longer than the fastest method: too near for an advice


@dataclass(frozen=True)
class Expected:
    """The predicted seconds of a step, by method, for `ranks` ranks with links of `gbit` Gbit/s
    each."""

    ranks: int
    gbit: float
    seconds: dict[str, float]


def plan(
    model: nn.Module,
    step: Callable[[], object],
    *,
    ranks: Sequence[int] = RANKS,
    gbit: Sequence[float] = RATES_GBIT,
    sparsity: float = 0.999,
    local_steps: int = 8,
) -> list[Expected]:
    """Measures `step` (forward, backward and update) on this process alone and predicts the rest.

    Args:
        model: the model whose parameters are exchanged, on the CPU.
        step: runs one training step without communication.
        ranks: numbers of ranks to predict, each at least 2.
        gbit: bandwidths of a rank's link to predict, in Gbit/s.
        sparsity: of DGC: the share of elements that is not sent.
        local_steps: of LocalSGD: steps between two averages.

    Returns:
        A prediction for each bandwidth `gbit` and number of `ranks`: `seconds` of a step, by
        method.

    Raises:
        InvalidArgument: the model has no parameters, or a number is out of its range.
    """
    check_module("model", model)
    function("step", step)
    ranks, gbit = integers("ranks", ranks), numbers_in("gbit", gbit)
    local_steps = integer("local_steps", local_steps, 1, 2**31 - 1)
    sparsity = number("sparsity", sparsity)
    if not 0 <= sparsity < 1:
        refuse("sparsity", sparsity, "at least 0 and less than 1")
    count = sum(parameter.numel() for parameter in model.parameters())
    if not count or min(ranks, default=0) < 2 or min(gbit, default=0) <= 0:
        raise InvalidArgument(
            f"plan: got {count} parameters, ranks={list(ranks)}, gbit={list(gbit)}; expected a "
            "model with parameters, at least 2 ranks and more than 0 Gbit/s"
        )
    seconds = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    compute_s = statistics.median(seconds[WARM:])
    loads = loads_of(count, sparsity)
    codings = measure_coding(loads[0]), measure_coding(loads[1])
    return [
        Expected(n, rate, expected(compute_s, loads, codings, (n, rate), local_steps))
        for rate in gbit
        for n in ranks
    ]


def loads_of(count: int, sparsity: float) -> tuple[Load, Load]:
    """Bytes that DGC sends for `count` elements: in raw packets, and in compact ones with 2-bit
    values."""
    k = to_send(count, sparsity)
    return Load([k], [count], 4, None), Load([k], [count], 4, code_at("2bit", 1 - sparsity))


def expected(
    compute_s: float,
    loads: tuple[Load, Load],
    codings: tuple[Coding, Coding],
    network: tuple[int, float],
    local_steps: int = 8,
) -> dict[str, float]:
    """The predicted seconds of a step by method.

    Args:
        compute_s: seconds of a step without communication.
        loads, codings: of raw and of compact packets: their sizes and coding speeds.
        network: number of ranks, and Gbit/s of each rank's link.
        local_steps: as of plan().
    """
    ranks, gbit = network
    link = Link(CALL_S, 8 / (gbit * 1e9))
    raw, compact = (
        predicted(load, ranks, link, coding) for load, coding in zip(loads, codings, strict=True)
    )
    return {
        "dense": compute_s + raw["dense"],
        "bf16": compute_s + raw["dense"] / 2,
        "dgc gather": compute_s + raw["gather"],
        "dgc 2bit gather": compute_s + compact["gather"],
        "dgc 2bit sharded": compute_s + compact["sharded"],
        f"local {local_steps}": compute_s + raw["dense"] / local_steps,
    }


def best(one: Expected) -> str:
    """The first of the methods that take at most NEAR times as long as the fastest; "-", for no
    advice, if dense gradients and another method do. bfloat16 sums are only for comparison."""
    times = {name: seconds for name, seconds in one.seconds.items() if name != "bf16"}
    near = [name for name, seconds in times.items() if seconds <= NEAR * min(times.values())]
    return "-" if len(near) > 1 and near[0] == "dense" else near[0]


def table(found: Sequence[Expected]) -> Table:
    """A table of the seconds by method, the best method, and the best speedup of DGC over dense."""
    names = list(found[0].seconds)
    first = {"# Gbit/s": "g", "ranks": ">"} | dict.fromkeys(names, ".4f")
    shown = Table(first | {"take": "<16", "dense/dgc": ">"})
    for one in found:
        dgc = min(seconds for name, seconds in one.seconds.items() if name.startswith("dgc"))
        ratio = f"{one.seconds['dense'] / dgc:.2f}x"
        shown.add(one.gbit, str(one.ranks), *one.seconds.values(), best(one), ratio)
    return shown


def main(options: argparse.Namespace) -> int:
    """Predicts for a multilayer perceptron of the given size; returns the exit status."""
    if options.json:
        options.json.touch()  # fails before the measurement, not after it
    width, layers = options.width, range(options.layers)
    needed = 4 * width * (3 * width * len(layers) + 2 * options.rows * (len(layers) + 1))
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise InvalidArgument(
            f"{len(layers)} layers of {width} x {width} and {options.rows} rows need "
            f"{needed / 2**30:.1f} GiB; this machine has {there / 2**30:.1f}"
        )
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in layers))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.randn(options.rows, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    found = plan(model, step, ranks=options.ranks, gbit=options.gbit)
    console().print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    return 0
