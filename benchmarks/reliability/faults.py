"""`python -m benchmarks faults`: fault injection in one rank, and the errors of the others.

The matrix is data: the fault, the call and its size, the moment, the transport. Every cell is run
and compared with the guarantees of docs/errors.md, or left out for a stored reason. The table
shows how many cells were as guaranteed, and the time until the others detected the fault. Exits
with 1 if a guarantee was violated.

    idle       between two calls, while the others wait in the second
    start      in a call, after the first bytes on the victim's channels
    middle     after half of the bytes that such a call sends and receives
    meanwhile  at a random moment of a series of calls, with the default strategy
    forming    while the group forms
    closing    after its last call, while the others leave
"""

from __future__ import annotations

import argparse
import collections
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.reliability import fault_plot
from benchmarks.reliability.fault_rank import DISAGREEMENTS, STRUCK, Call, Job, Seen, rank_sees
from pycomm.bench.support import machine, summaries
from pycomm.testing import FaultPlan, run_ranks

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
ONE_WAY = ("broadcast", "reduce", "gather", "scatter")
"""Data flows to or from the root: a rank that is done before the others disagree cannot know."""
VERBS = (
    *REDUCTIONS,
    "broadcast",
    "all_gather",
    "gather",
    "all_gather_v",
    "scatter",
    "all_to_all",
    "barrier",
)
COUNTS = {"tiny": 24, "large": 600_000}
"""Elements of float32: of 2, 3, 4 and 8 ranks."""
GRAINS = {"tiny": 1, "large": 997}
"""Bytes that a throttle delivers at once: each such chunk costs a sleep and a wake-up."""
MOMENTS = {
    "kill": ("idle", "start", "middle", "meanwhile", "forming", "closing"),
    "stop": ("idle", "start", "meanwhile", "forming"),
    "exit": ("idle", "meanwhile", "closing"),
    "exception": ("idle",),
    "disconnect": ("start", "middle", "forming"),
    "corrupt": ("start", "middle", "forming"),
    "delay": ("start",),
    "throttle": ("start",),
    "skip": ("idle",),
    **dict.fromkeys(DISAGREEMENTS, ("idle",)),
}
ALL_MOMENTS = MOMENTS["kill"]
NOT_THEN = {
    "stop": {
        "middle": "often the awaited data was already sent at that point: see meanwhile",
        "closing": "a leaving rank does not wait",
    },
    "exit": dict.fromkeys(("start", "middle", "forming"), "for the others it equals a kill"),
    "exception": dict.fromkeys(ALL_MOMENTS[1:], "a program raises between calls"),
}
"""Why an action has no such moment, if OTHERWISE gives no reason."""
OTHERWISE = {
    "disconnect": "the transport acts on transferred bytes",
    "corrupt": "the transport acts on transferred bytes",
    "delay": "the fault lasts for the whole run",
    "throttle": "the fault lasts for the whole run",
    "skip": "the call differs from its start",
    **dict.fromkeys(DISAGREEMENTS, "the call differs from its start"),
}
ENDS = ("kill", "stop", "exit", "exception", "disconnect", "corrupt")
"""After these a rank is lost; DISAGREEMENTS and "skip" raise Mismatch; slow ones no error."""
PROCESSES = ("kill", "stop", "exit", "exception")
HEARTBEAT_S = 1.0
AT_ONCE_MS = 1000.0
LIMIT_S = 30.0
MOST_WORDS = 240  # stored characters of a rank's error


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    action: str
    moment: str
    verb: str
    size: str
    transport: str
    ranks: int


@dataclass(frozen=True)
class Outcome:
    """A cell and its outcome; `seen` is by rank, without the victim where it is gone."""

    cell: Cell
    broken: str  # the violated guarantee, or ""
    seconds: float
    seen: list[Seen | None]
    before: str = ""  # the violation of the previous run, with --again


def matrix(
    actions: Sequence[str], transports: Sequence[str], sizes: Sequence[str], ranks: Sequence[int]
) -> Iterator[Cell]:
    """All applicable cells of these kinds."""
    for cell in every(actions, transports, sizes, ranks):
        if not left_out(cell):
            yield cell


def every(
    actions: Sequence[str], transports: Sequence[str], sizes: Sequence[str], ranks: Sequence[int]
) -> Iterator[Cell]:
    """The whole product, with cells that are not applicable."""
    for parts in itertools.product(actions, ALL_MOMENTS, VERBS, sizes, transports, ranks):
        yield Cell(*parts)


def left_out(cell: Cell) -> str:
    """Why this cell is not run; "" if it is."""
    if cell.moment not in MOMENTS[cell.action]:
        return NOT_THEN.get(cell.action, {}).get(cell.moment) or OTHERWISE[cell.action]
    if cell.moment in ("forming", "closing"):
        return "" if cell.verb == VERBS[0] else "no call is in progress: see all_reduce"
    if cell.verb == "barrier":
        return _no_barrier(cell)
    reasons = {
        "it reduces nothing": cell.action == "wrong op" and cell.verb not in REDUCTIONS,
        "it has no root": cell.action == "wrong root" and cell.verb not in ONE_WAY,
        "both ranks wait for each other": cell.action == "wrong root" and cell.ranks == 2,
        "its counts may differ": cell.action == "wrong count" and cell.verb == "all_gather_v",
    }
    return next((reason for reason, holds in reasons.items() if holds), "")


def _no_barrier(cell: Cell) -> str:
    reasons = {
        "it carries no data": cell.size != "tiny" or cell.action.startswith("wrong "),
        "the barrier replaces a call": cell.action == "skip",
        "the fault would hit the cell's first barrier": cell.moment in ("start", "middle"),
    }
    found = next((reason for reason, holds in reasons.items() if holds), "")
    # A wrong operation makes the first reason void: the verb is another one.
    return "" if cell.action == "wrong operation" and cell.size == "tiny" else found


def outcome(cell: Cell, seed: int = 0) -> Outcome:
    """Runs one cell."""
    n, victim = cell.ranks, cell.ranks - 1
    call = Call(cell.verb, COUNTS[cell.size])
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        job = Job(call, victim, cell.action, cell.moment, folder, seed)
        results = run_ranks(
            n,
            rank_sees,
            job,
            transport=cell.transport,
            processes=cell.action in PROCESSES,
            timeout_s=LIMIT_S,
            heartbeat_s=HEARTBEAT_S,
            faults=_plans(cell, call, f"{folder}/{STRUCK}"),
            return_exceptions=True,
        )
    seen = [
        None
        if rank == victim and cell.action in PROCESSES
        else result
        if isinstance(result, Seen)
        else raised(result)
        for rank, result in enumerate(results)
    ]
    return Outcome(cell, _broken(cell, seen), time.monotonic() - start, seen)


def _plans(cell: Cell, call: Call, stamp: str) -> list[FaultPlan]:
    """The fault plan of the transport, if the transport injects the fault."""
    victim = cell.ranks - 1
    if cell.action in ("delay", "throttle"):
        grain = GRAINS[cell.size]
        ranks = range(cell.ranks)
        return [FaultPlan(rank, cell.action, seconds=0.002, chunk_bytes=grain) for rank in ranks]
    if cell.moment == "forming":
        return [FaultPlan(victim, cell.action)]
    if cell.moment in ("start", "middle"):
        after = 0 if cell.moment == "start" else 4 * call.count // 2
        operation = "all_gather" if cell.verb == "all_gather_v" else cell.verb
        return [FaultPlan(victim, cell.action, operation, after, timestamp_file=stamp)]
    return []


def raised(error: BaseException) -> Seen:
    """The outcome of a rank that did not report."""
    return Seen(type(error).__name__, str(error), getattr(error, "peer", None))


def _broken(cell: Cell, seen: Sequence[Seen | None]) -> str:
    """The first violated guarantee, or ""."""
    victim = cell.ranks - 1
    for rank, one in enumerate(seen):
        if one is None or (rank == victim and cell.action in ENDS):
            continue
        if found := complaint(cell, victim, one):
            return f"rank {rank}: {found}"
    return ""


def complaint(cell: Cell, victim: int, one: Seen, at_once_ms: float = AT_ONCE_MS) -> str:
    """The violation in a rank's observations, or ""."""
    raised = f"{one.error}: {one.text}" if one.error else "nothing"
    wanted = _wanted(cell)
    found = {
        f"{one.wrong} elements are not what they should be, and {raised} was raised": one.wrong
        and (cell.verb not in ONE_WAY or "undefined" not in one.text),
        f"{wanted or 'nothing'} was expected, not {raised}": one.error != wanted,
        "the group was no longer usable": not one.usable,
    }
    if wanted in ("PeerLost", "GroupBroken"):
        limit_ms = at_once_ms + (1e3 * HEARTBEAT_S if cell.action == "stop" else 0.0)
        named = one.peer == victim and f"rank {victim} " in one.text
        found[f"rank {victim} is not named: {raised}"] = not named
        found[f"reported after {one.noticed_ms:.0f} ms: {raised}"] = one.noticed_ms > limit_ms
    return next((what for what, true in found.items() if true), "")


def _wanted(cell: Cell) -> str:
    """The class of the guaranteed error, "" for none."""
    if cell.action in ("delay", "throttle") or cell.moment == "closing":
        return ""
    if cell.action == "exception":
        return "GroupBroken"  # the launcher aborts the group with the reason
    return "PeerLost" if cell.action in ENDS else "Mismatch"


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm bench faults", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--actions", default=",".join(MOMENTS), help="(%(default)s)")
    parser.add_argument("--transports", default="shm,tcp", help="(%(default)s)")
    parser.add_argument("--sizes", default=",".join(COUNTS), help="(%(default)s)")
    parser.add_argument("--ranks", default="3", help="some of 2, 3, 4 and 8 (%(default)s)")
    parser.add_argument("--json", type=Path, help="where to store times and violations")
    parser.add_argument(
        "--again", action="store_true", help="only the violated cells of --json; keeps the times"
    )
    parser.add_argument("--plot", type=Path, help="where to draw them (.png, .svg)")
    options = parser.parse_args(argv)
    known = {"actions": MOMENTS, "transports": ("shm", "tcp"), "sizes": COUNTS}
    chosen = {name: getattr(options, name).split(",") for name in (*known, "ranks")}
    for name, names in {**known, "ranks": ("2", "3", "4", "8")}.items():
        if bad := [word for word in chosen[name] if word not in names]:
            parser.error(f"no {bad[0]!r}: --{name} takes some of {', '.join(names)}")
    ranks = [int(n) for n in chosen.pop("ranks")]
    console = Console(soft_wrap=True, highlight=False)
    cells = list(matrix(**chosen, ranks=ranks))
    if options.again and not options.json:
        parser.error("--again needs --json")
    if options.again:
        return _again(options.json, console)
    found: list[Outcome] = []
    try:
        with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
            task = bar.add_task("", total=len(cells))
            for number, cell in enumerate(cells):
                bar.update(task, description=f"{cell.action}, {cell.moment}: {cell.verb}")
                found.append(outcome(cell, number))
                if found[-1].broken:
                    console.print(f"{cell}\n    {found[-1].broken}", markup=False)
                bar.advance(task)
    except KeyboardInterrupt:
        console.print("interrupted")
        return 130
    console.print(_table(found))
    missed = [(cell, why) for cell in every(**chosen, ranks=ranks) if (why := left_out(cell))]
    console.print(f"{len(found)} cells run, {len(missed)} not applicable")
    _store(options.json, found, missed)
    if options.plot:
        fault_plot.save(options.plot, [asdict(one) for one in found])
    return 1 if any(one.broken for one in found) else 0


def _table(found: Sequence[Outcome]) -> Table:
    """A line for each action on each transport with each number of ranks."""
    shown = Table()
    for name in ("what happens", "by", "ranks", "cells", "kept", "raised"):
        shown.add_column(name)
    shown.add_column("median ms", justify="right")
    shown.add_column("worst", justify="right")
    rows = collections.defaultdict(list)
    for one in found:
        rows[one.cell.action, one.cell.transport, one.cell.ranks].append(one)
    for (action, transport, ranks), outcomes in rows.items():
        observed = [seen for one in outcomes for seen in one.seen if seen is not None]
        errors = collections.Counter(seen.error or "no error" for seen in observed)
        times = [
            seen.noticed_ms for seen in observed if seen.error == "PeerLost" and seen.noticed_ms
        ]
        shown.add_row(
            action,
            transport,
            str(ranks),
            str(len(outcomes)),
            str(sum(not one.broken for one in outcomes)),
            ", ".join(f"{name} {count}" for name, count in errors.items()),
            f"{statistics.median(times):.1f}" if times else "",
            f"{max(times):.1f}" if times else "",
        )
    return shown


def _store(path: Path | None, found: Sequence[Outcome], missed: Sequence[tuple[Cell, str]]) -> None:
    """Times and violations by action and transport; violated cells; cells left out, by reason."""
    if path is not None:
        content = {
            "machine": machine.describe(),
            "rows": summary(found),
            "violations": [_violation(one) for one in found if one.broken],
            "left_out": _gaps(missed),
        }
        summaries.write(path, content)


def summary(found: Sequence[Outcome]) -> list[dict[str, Any]]:
    """A row for each action on each transport."""
    rows = collections.defaultdict(list)
    for one in found:
        rows[one.cell.action, one.cell.transport].append(one)
    return [
        {
            "action": action,
            "transport": transport,
            "cells": len(of),
            "violations": sum(bool(one.broken) for one in of),
            "noticed_ms": summaries.summarize(
                seen.noticed_ms for one in of for seen in one.seen if seen and seen.error
            ),
        }
        for (action, transport), of in rows.items()
    ]


def _violation(one: Outcome) -> dict[str, Any]:
    return asdict(one.cell) | {"broken": one.broken, "before": one.before}


def _again(path: Path, console: Console) -> int:
    """Runs the violated cells of a stored run again; its times stay as they are."""
    content = summaries.read(path)
    left = []
    for number, row in enumerate(content["violations"]):
        if not row["broken"]:  # repeated before
            left.append(row)
            continue
        cell = Cell(**{field.name: row[field.name] for field in fields(Cell)})
        one = replace(outcome(cell, number), before=row["broken"])
        console.print(f"{cell}\n    {one.broken or 'as guaranteed'}", markup=False)
        left.append(_violation(one))
        if not one.broken:
            key = (cell.action, cell.transport)
            of = next(r for r in content["rows"] if (r["action"], r["transport"]) == key)
            of["violations"] -= 1
    content["violations"] = left
    summaries.write(path, content)
    return 1 if any(row["broken"] for row in left) else 0


def _gaps(missed: Sequence[tuple[Cell, str]]) -> list[dict[str, Any]]:
    """How many cells each reason leaves out."""
    counts = collections.Counter(why for _, why in missed)
    return [{"why": why, "cells": cells} for why, cells in counts.items()]
