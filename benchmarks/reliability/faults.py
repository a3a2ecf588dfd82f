"""`python -m benchmarks faults`: fault injection in one rank, and the errors of the others.

The matrix is data: the fault, the call and its size, the moment, the transport. Every cell is run
and compared with the guarantees of docs/errors.md, or left out for a reason. The table shows how
many cells violated a guarantee, and the time until the others detected the fault. Exits with 1 if a
guarantee was violated.

    idle       between two calls, while the others wait in the second
    start      in a call, after the first bytes on the victim's channels
    middle     after half of the bytes that such a call sends and receives
    meanwhile  at a random moment of a series of calls, with the default strategy
    forming    while the group forms
    closing    after its last call, while the others leave
"""

from __future__ import annotations

import collections
import itertools
import tempfile
from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from benchmarks.reliability import command
from benchmarks.reliability.fault_rank import (
    DISAGREEMENTS,
    ONE_WAY,
    REDUCTIONS,
    STRUCK,
    TWO_WAY,
    Call,
    Job,
    Seen,
    rank_of_cell,
    seen_of,
)
from pycomm.bench.support import summaries
from pycomm.testing import FaultPlan, run_ranks

COUNTS = {"tiny": 24, "large": 600_000}
"""Elements of float32: of 2, 3, 4 and 8 ranks."""
GRAINS = {"tiny": 1, "large": 997}
"""Bytes that a throttle delivers at once: each such chunk costs a sleep and a wake-up."""
TRANSPORTS, RANKS = ("shm", "tcp"), ("2", "3", "4", "8")
ALL_MOMENTS = ("idle", "start", "middle", "meanwhile", "forming", "closing")
MOMENTS: dict[str, tuple[str, ...]] = {
    "kill": ALL_MOMENTS,
    # In the middle, the awaited data was often sent already: see meanwhile. A leaving rank does not
    # wait.
    "stop": ("idle", "start", "meanwhile", "forming"),
    "exit": ("idle", "meanwhile", "closing"),  # otherwise it equals a kill for the others
    "exception": ("idle",),  # a program raises between calls, and aborts between them
    "abort": ("idle",),
    # The transport acts on transferred bytes.
    "disconnect": ("start", "middle", "forming"),
    "corrupt": ("start", "middle", "forming"),
    # These last for the whole run.
    "delay": ("start",),
    "throttle": ("start",),
    # Another call differs from its start.
    **dict.fromkeys(DISAGREEMENTS, ("idle",)),
}
ENDS = ("kill", "stop", "exit", "exception", "abort", "disconnect", "corrupt")
"""After these a rank is lost; DISAGREEMENTS raise Mismatch; slow ones no error."""
PROCESSES = ("kill", "stop", "exit", "exception")
HEARTBEAT_S = 1.0
AT_ONCE_MS = 1000.0
LIMIT_S = 30.0


@dataclass(frozen=True)
class Cell:
    """One cell of the matrix."""

    action: str
    moment: str
    verb: str
    size: str
    transport: str
    ranks: int

    def left_out(self) -> str:
        """The reason why this cell does not exist; "" if it does."""
        barrier, action, moment = self.verb == "barrier", self.action, self.moment
        reasons = {
            "the fault has no such moment": moment not in MOMENTS[action],
            "no call is in progress: see all_reduce": moment in ("forming", "closing")
            and self.verb != "all_reduce",
            "it reduces nothing": action == "wrong op" and self.verb not in REDUCTIONS,
            "it has no root": action == "wrong root" and self.verb not in ONE_WAY,
            "both ranks wait for each other": action == "wrong root" and self.ranks == 2,
            "its counts may differ": action == "wrong count" and self.verb == "all_gather_v",
            "a barrier carries no data": barrier
            and (self.size != "tiny" or action in ("wrong count", "wrong dtype")),
            "a barrier replaces the call": barrier and action == "skip",
            "it would hit the first barrier": barrier and moment in ("start", "middle"),
        }
        return next((why for why, holds in reasons.items() if holds), "")


@dataclass(frozen=True)
class Outcome:
    """A cell and its outcome; `seen` is by rank, without the victim where it is gone."""

    cell: Cell
    broken: str  # the violated guarantee, or ""
    seen: list[Seen | None]


def matrix(
    actions: Collection[str] = MOMENTS,
    transports: Collection[str] = TRANSPORTS,
    sizes: Collection[str] = COUNTS,
    ranks: Collection[str] = ("3",),
) -> Iterator[Cell]:
    """All cells of these kinds, also those that do not exist."""
    verbs = dict.fromkeys((*TWO_WAY, *ONE_WAY))
    for parts in itertools.product(actions, ALL_MOMENTS, verbs, sizes, transports, map(int, ranks)):
        yield Cell(*parts)


def outcome(cell: Cell, seed: int = 0) -> Outcome:
    """Runs one cell."""
    victim, call = cell.ranks - 1, Call(cell.verb, COUNTS[cell.size])
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            cell.ranks,
            rank_of_cell,
            Job(call, victim, cell.action, cell.moment, folder, seed),
            transport=cell.transport,
            processes=cell.action in PROCESSES,
            timeout_s=LIMIT_S,
            heartbeat_s=HEARTBEAT_S,
            faults=_plans(cell, call, f"{folder}/{STRUCK}"),
            return_exceptions=True,
        )
    seen = [result if isinstance(result, Seen) else seen_of(result) for result in results]
    gone = [None] if cell.action in PROCESSES else seen[victim:]
    return Outcome(cell, _broken(cell, seen), [*seen[:victim], *gone])


def _plans(cell: Cell, call: Call, stamp: str) -> list[FaultPlan]:
    """The fault plan of the transport, if the transport injects the fault."""
    victim, action = cell.ranks - 1, cell.action
    if action in ("delay", "throttle"):
        grain = GRAINS[cell.size]
        ranks = range(cell.ranks)
        return [FaultPlan(rank, action, seconds=0.002, chunk_bytes=grain) for rank in ranks]
    if cell.moment == "forming":
        return [FaultPlan(victim, action)]
    if cell.moment in ("start", "middle"):
        after = 0 if cell.moment == "start" else 4 * call.count // 2
        operation = "all_gather" if cell.verb == "all_gather_v" else cell.verb
        return [FaultPlan(victim, action, operation, after, timestamp_file=stamp)]
    return []


def _broken(cell: Cell, seen: Sequence[Seen]) -> str:
    """The first violated guarantee, or ""."""
    victim = cell.ranks - 1
    for rank, one in enumerate(seen):
        if rank == victim and cell.action in ENDS:
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
    if cell.action in ("exception", "abort"):
        return "GroupBroken"  # the launcher aborts the group with the reason
    return "PeerLost" if cell.action in ENDS else "Mismatch"


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("faults", __doc__)
    known = {"actions": MOMENTS, "transports": TRANSPORTS, "sizes": COUNTS, "ranks": RANKS}
    for name, some in known.items():
        default = "3" if name == "ranks" else ",".join(some)
        text = f"some of {', '.join(some)} (%(default)s)"
        parser.add_argument(f"--{name}", type=command.some_of(some), default=default, help=text)
    options = parser.parse_args(argv)
    cells = list(matrix(options.actions, options.transports, options.sizes, options.ranks))
    gaps = collections.Counter(why for cell in cells if (why := cell.left_out()))
    found = []
    cells = [cell for cell in cells if not cell.left_out()]
    for number, cell in enumerate(command.progress(cells, "fault injection")):
        found.append(outcome(cell, number))
        if found[-1].broken:
            command.CONSOLE.print(f"{cell}\n    {found[-1].broken}", markup=False)
    command.report(
        options.json,
        rows=summary(found),
        violations=[{**asdict(one.cell), "broken": one.broken} for one in found if one.broken],
        left_out=[{"why": why, "cells": count} for why, count in gaps.items()],
    )
    return 1 if any(one.broken for one in found) else 0


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
