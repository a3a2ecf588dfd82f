"""What `pycomm bench kernels` does with its options: see command.py."""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from itertools import chain, zip_longest
from pathlib import Path
from typing import Any

import torch

import pycomm
from pycomm._tables import Table, console
from pycomm.bench.collectives.limits import TOLERANCE
from pycomm.bench.kernels import residuals, sparse
from pycomm.bench.kernels.comparison import OURS, Call, Comparison, Traffic
from pycomm.bench.kernels.device_timing import DEVICES, STREAMS, Cpu, Spent
from pycomm.bench.kernels.residuals import STEPS
from pycomm.bench.kernels.sparse import Case
from pycomm.bench.kernels.table import COLUMNS, Missing, Row, add
from pycomm.bench.kernels.torch_steps import TORCH_STEPS, Choose, Step, torch_topk
from pycomm.bench.kernels.verification import all_wrong
from pycomm.bench.support import machine, packages, summaries
from pycomm.bench.support.sizes import format_size
from pycomm.errors import Unsupported

BYTES_EACH = 440
"""Bytes of all arrays of all comparisons together, for an element."""


def run(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    """Measures, prints, stores; returns the exit status."""
    more = packages.in_repository("benchmarks.kernels.comparisons")
    loaders = more.LOADERS if more and options.device == "cuda" else {}
    known = [*TORCH_STEPS, *loaders]
    names = known if options.peers is None else [n for n in options.peers.split(",") if n]
    if unknown := [name for name in names if name not in known]:
        parser.error(f"{unknown[0]!r} is not among {', '.join(known)}")
    if options.plot and (why := packages.missing("matplotlib")):
        parser.error(f"--plot {why}")
    try:
        place = DEVICES[options.device]()
    except Unsupported as error:
        parser.error(f"--device {options.device}: no GPU can be used here: {error}")
    recorded = residuals.load(options.residuals) if options.residuals else residuals.record()
    threads = options.threads or torch.get_num_threads()
    torch.set_num_threads(threads)
    pycomm.set_num_threads(threads)
    settings = {
        **place.describe(),
        "threads": threads,
        "rounds": options.rounds,
        "residuals": recorded.digest,
    }
    to, shown = console(), Table(COLUMNS)
    to.print(f"# {recorded.u.size} elements recorded, SHA-256 {recorded.digest}, on {place.name}")
    steps, choices, missing = comparators(names, loaders)
    if place.name != "cpu":
        missing.append(Missing("DGC", OURS, "its ranks communicate in host memory: no kernel time"))
    rows: list[Row] = []
    for size in options.sizes:
        if why := place.memory_shortage(BYTES_EACH * size):
            missing.append(Missing(f"all of {format_size(size)}", "all", why))
            continue
        case = Case(recorded, size, place.device)
        comparisons = sparse.comparisons(case, steps, choices)
        comparisons += more.comparisons(case, steps, place.name == "cpu") if more else []
        comparisons, refused = able(select(comparisons, options.kernels, parser.error))
        missing += [one for one in refused if one not in missing]
        if message := all_wrong(comparisons, place):
            print(f"{case.count} elements: {message}")
            return 1
        new = measured(place, case.count, comparisons, options.rounds)
        rows += new
        for row in new:
            add(shown, row)
        shown.flush(to)
        del case, comparisons
        place.forget()
    for one in missing:
        to.print(f"{one.kernel}: {one.peer} is left out: {one.why}")
    results = {"rows": [asdict(row) for row in rows], "missing": [asdict(one) for one in missing]}
    summaries.store(options.json, settings=settings, **results)
    if options.plot:
        _draw(options.plot, rows, place, threads)
    fast = [r for r in rows if r.limit_percent > 100 * TOLERANCE]
    for row in fast:
        message = f"{row.peer}: {row.kernel} of {row.count} runs at {row.limit_percent:.0f} %"
        print(f"{message}: the limit is wrong")
    return 1 if fast else 0


def select(
    comparisons: Sequence[Comparison], kernels: str | None, error: Callable[[str], Any]
) -> list[Comparison]:
    """Those of the named kernels, and of dgc_step, of whose time all rows give a share."""
    chosen = {one.kernel for one in comparisons}
    if kernels is not None:
        unknown = set(kernels.split(",")) - chosen
        if unknown:
            error(f"{min(unknown)!r} is not among {', '.join(sorted(chosen))}")
        chosen = {"dgc_step", *kernels.split(",")}
    return [one for one in comparisons if one.kernel in chosen]


def comparators(
    names: Sequence[str], loaders: Mapping[str, Callable[[], Any]]
) -> tuple[dict[str, Step], dict[str, Choose], list[Missing]]:
    """The other implementations of dgc_step and topk, and those that are missing here."""
    steps = {name: TORCH_STEPS[name] for name in names if name in TORCH_STEPS}
    choices: dict[str, Choose] = {"torch.topk": torch_topk}
    missing: list[Missing] = []
    for name in (name for name in names if name in loaders):
        try:
            library = loaders[name]()
        except ImportError as error:  # the table shows the reason
            missing.append(Missing("dgc_step", name, str(error)))
        else:
            steps[name] = library.step
            if library.choose is not None:
                choices[name] = library.choose
    return steps, choices, missing


def able(comparisons: Sequence[Comparison]) -> tuple[list[Comparison], list[Missing]]:
    """The comparisons without the peers that cannot run them here."""
    left, missing = [], []
    for one in comparisons:
        calls = {}
        for peer, call in one.calls.items():
            try:
                call(0)
            except Exception as error:  # any error of another library: it is listed as left out
                if peer == OURS:
                    raise
                missing.append(Missing(one.kernel, peer, f"{type(error).__name__}: {error}"))
            else:
                calls[peer] = call
        one.restart()
        left.append(replace(one, calls=calls))
    return left, missing


def measured(place: Cpu, count: int, comparisons: Sequence[Comparison], rounds: int) -> list[Row]:
    """All contestants in turn; each round runs the recorded steps once. The first step, after the
    reset to the recorded state, is not timed."""
    by_kernel = {one.kernel: one for one in comparisons}
    waiting = {f"{one.kernel}/{peer}" for one in comparisons for peer in one.waits}
    calls = _between(place.streams(count), comparisons)
    timers = {name: place.timer(call, waits=name in waiting) for name, call in calls.items()}
    spent: dict[str, list[Spent]] = {name: [] for name in calls}
    for _ in range(rounds):
        for one in comparisons:
            one.restart()
        for step in range(STEPS):
            for name, timer in timers.items():
                found = timer(step)
                if step:
                    spent[name].append(found)
    medians = {name: statistics.median(s.seconds for s in all) for name, all in spent.items()}
    speeds = {  # the best: torch splits a loop evenly, so one late thread delays all of it
        name: Traffic(*(each * count / min(spent[name]).seconds for each in STREAMS[name]))
        for name in STREAMS.keys() & calls.keys()
    }
    rows = []
    for name in calls.keys() - STREAMS.keys():
        kernel, peer = name.split("/")
        moved = by_kernel[kernel].more.get(peer, by_kernel[kernel].traffic)
        limit = _limit(speeds, moved)
        rows.append(
            Row(
                kernel=kernel,
                count=count,
                peer=peer,
                time_ms=medians[name] * 1e3,
                best_ms=min(spent[name]).seconds * 1e3,
                limit_bytes=sum(moved),
                limit_ms=limit * 1e3,
                limit_percent=100 * limit / min(spent[name]).seconds,
                ratio=medians[name] / medians[f"{kernel}/{OURS}"],
                step_percent=100 * medians[name] / medians[f"dgc_step/{OURS}"],
                host_us=statistics.median(s.host_s for s in spent[name]) * 1e6,
                replayed=place.replays and name not in waiting,
            )
        )
    return sorted(rows, key=lambda r: (r.kernel, r.ratio))


def _limit(speeds: dict[str, Traffic], moved: Traffic) -> float:
    """The least seconds in which these bytes can be moved; of each loop, the bytes that it read and
    wrote in a second."""
    others = {"read": moved.read >= 2 * moved.written, "fill": moved.written >= 2 * moved.read}
    mixed = max(sum(speed) for name, speed in speeds.items() if others.get(name, True))
    read = max(speed.read for speed in speeds.values())
    written = max(speed.written for speed in speeds.values())
    return max(sum(moved) / mixed, moved.read / read, moved.written / written)


def _between(streams: dict[str, Call], comparisons: Sequence[Comparison]) -> dict[str, Call]:
    """Adds the calls of the comparisons: pycomm's first and the others last, so that the data of
    one contestant has left the caches before another of its comparison runs."""
    turns = [[(f"{c.kernel}/{peer}", call) for peer, call in c.calls.items()] for c in comparisons]
    first, *others = (filter(None, turn) for turn in zip_longest(*turns))
    return dict(first) | streams | dict(chain(*others))


def _draw(path: Path, rows: Sequence[Row], place: Cpu, threads: int) -> None:
    """The fraction of the limit over size, a panel for each kernel."""
    from pycomm.bench.support import plots  # imports matplotlib, which may be missing

    def draw(own: Sequence[Row], axes: Any) -> None:
        axes.set(xlabel="elements", ylabel="%")
        plots.lines(axes, own, ("peer", "count", "limit_percent"), xscale="log", ylim=(0, 105))
        axes.axhline(100, **plots.LIMIT)

    caption = f"{place.describe().get('gpu', f'{threads} threads')}, {machine.caption()}"
    shares = [row.limit_percent for row in rows if row.peer == OURS]
    title = f"pycomm's kernels reach {min(shares):.0f} to {max(shares):.0f} % of the memory's speed"
    plots.save(path, plots.grouped(rows, lambda r: r.kernel, draw), title, caption, 2.2, 2)
