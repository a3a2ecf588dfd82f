"""`pycomm plan` and pycomm.plan(): what a step would take with more ranks, or another line.

A step of the model is measured here, alone; so are the kernels. What travels is counted
(compress/schedule.py), by a line of the speed that is asked for. Nothing hides behind the backward
pass, and a call costs CALL_S whatever the number of ranks: it is of large gradients that this
speaks. `bench links --training` holds it against measurements. Called by users, __main__.py and
benchmarks/steps.py.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from torch import nn

from pycomm.compress.cost_model import Coding, Link, measure_coding, predicted
from pycomm.compress.schedule import Load, code_at, to_send
from pycomm.errors import InvalidArgument

__all__ = ["Expected", "best", "draw", "expected", "main", "plan", "table"]

RATES_GBIT = (1.0, 10.0, 100.0)
RANKS = (2, 8, 64, 512, 4096)
CALL_S = 1e-4  # a message on its way between hosts
WARM, STEPS = 2, 5


@dataclass(frozen=True)
class Expected:
    """Seconds of a step with `ranks` ranks behind lines of `gbit` each, by method."""

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
    """Measures `step`, forward, backward and update of this process alone, and expects the rest.

    Args:
        model: whose parameters travel, on the CPU.
        step: takes one step of training without communication.
        ranks, gbit: the numbers of ranks, and speeds of a rank's line, that are asked for.
        sparsity: of DGC.
        local_steps: steps between the sums of LocalSGD.

    Raises:
        InvalidArgument: a model without parameters, ranks below 2, or a line without speed.
    """
    count = sum(parameter.numel() for parameter in model.parameters())
    if not count or min(ranks, default=0) < 2 or min(gbit, default=0) <= 0:
        raise InvalidArgument(
            f"plan: {count} parameters, ranks={list(ranks)}, gbit={list(gbit)}: it takes a model "
            "with parameters, at least 2 ranks and lines above 0 Gbit/s"
        )
    seconds = []
    for _ in range(WARM + STEPS):
        start = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - start)
    compute_s = statistics.median(seconds[WARM:])
    k = to_send(count, sparsity)
    raw = Load([k], [count], 4, None)
    compact = Load([k], [count], 4, code_at("2bit", 1 - sparsity))
    codings = measure_coding(raw), measure_coding(compact)
    return [
        Expected(n, rate, expected(compute_s, (raw, compact), codings, (n, rate), local_steps))
        for rate in gbit
        for n in ranks
    ]


def expected(
    compute_s: float,
    loads: tuple[Load, Load],
    codings: tuple[Coding, Coding],
    where: tuple[int, float],
    local_steps: int = 8,
) -> dict[str, float]:
    """Seconds of a step by method.

    Args:
        compute_s: of a step without communication.
        loads, codings: of raw packets and of compact ones, and how fast they are coded.
        where: ranks, and Gbit/s of each one's line.
        local_steps: see plan().
    """
    ranks, gbit = where
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
    """The method of the fewest seconds, of equals the first; sums in bfloat16 are there to be
    compared with, not to be had."""
    return min((name for name in one.seconds if name != "bf16"), key=lambda name: one.seconds[name])


def table(found: Sequence[Expected]) -> str:
    """Seconds by method, what to take, and how many times faster than dense the best DGC is."""
    names = list(found[0].seconds)
    head = " ".join(f"{name:>15}" for name in names)
    lines = [f"{'# Gbit/s':>8} {'ranks':>6} {head}  {'take':15} {'dense/dgc':>9}"]
    for one in found:
        row = " ".join(f"{one.seconds[name]:>15.4f}" for name in names)
        dgc = min(seconds for name, seconds in one.seconds.items() if name.startswith("dgc"))
        ratio = one.seconds["dense"] / dgc
        lines.append(f"{one.gbit:>8g} {one.ranks:>6} {row}  {best(one):15} {ratio:>8.2f}x")
    return "\n".join(lines)


COLORS = {"dense": "#9aa0a6", "bf16": "#dadce0", "dgc gather": "#f9ab00"}
COLORS |= {"dgc 2bit gather": "#e8710a", "dgc 2bit sharded": "#1a73e8"}


def draw(path: Path, found: Sequence[Expected], caption: str = "") -> None:
    """Seconds of a step over the number of ranks, a panel for each line; needs matplotlib."""
    from matplotlib.figure import Figure

    rates = list(dict.fromkeys(one.gbit for one in found))
    figure = Figure(figsize=(4.2 * len(rates), 4.2), layout="constrained")
    panels = figure.subplots(1, len(rates), squeeze=False, sharey=True).flat
    for axes, gbit in zip(panels, rates, strict=True):
        own = [one for one in found if one.gbit == gbit]
        ranks = [one.ranks for one in own]
        for name in own[0].seconds:
            took, color = [one.seconds[name] for one in own], COLORS.get(name, "#188038")
            axes.plot(ranks, took, marker="o", ms=3.5, lw=1.8, color=color, label=name)
        axes.set(xscale="log", yscale="log", title=f"{gbit:g} Gbit/s", xlabel="ranks")
        axes.set_xticks(ranks, [str(n) for n in ranks])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0].set_ylabel("seconds of a step, expected")
    panels[0].legend(frameon=False)
    figure.suptitle(caption, fontsize=9, color="#5f6368")
    figure.savefig(path, dpi=150)


def main(argv: Sequence[str]) -> int:
    """Plans for a perceptron of the size that is asked for; the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm plan", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--width", type=int, default=1432, help="of a layer (%(default)s)")
    parser.add_argument("--layers", type=int, default=20, help="(%(default)s: 41 M parameters)")
    parser.add_argument("--rows", type=int, default=64, help="of a batch (%(default)s)")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="(%(default)s)")
    parser.add_argument("--gbit", default="1,10,100", help="of a rank's line (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store all figures")
    parser.add_argument("--plot", type=Path, help="where to draw seconds over ranks")
    options = parser.parse_args(argv)
    if options.plot and importlib.util.find_spec("matplotlib") is None:
        parser.error('--plot needs matplotlib: pip install "matplotlib>=3.8"')
    width = options.width
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(options.layers)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6, momentum=0.9)
    x = torch.randn(options.rows, width)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    ranks = [int(word) for word in options.ranks.split(",")]
    gbit = [float(word) for word in options.gbit.split(",")]
    found = plan(model, step, ranks=ranks, gbit=gbit)
    print(table(found))
    if options.json:
        options.json.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    if options.plot:
        draw(options.plot, found, f"{width**2 * options.layers / 1e6:.0f} M parameters")
    return 0
