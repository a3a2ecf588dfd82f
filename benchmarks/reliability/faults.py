"""`python -m benchmarks faults`: fault injection in one rank, and the errors of the others.

The matrix is data: the fault, its moment, the call and its size, the transport. Every cell is run
and compared with the guarantees of docs/errors.md. The table shows how many cells violated a
guarantee, and the time until the others detected the fault. Exits with 1 if a guarantee was
violated.

    idle       between two calls, while the others wait in the second
    start      in a call, after the first bytes on the victim's channels
    middle     after half of the bytes that such a call sends and receives
    meanwhile  at a random moment of a series of calls, with the default strategy
    forming    while the group forms
    closing    after its last call, while the others leave
"""

from __future__ import annotations

import collections
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from random import Random

from benchmarks.reliability.fault_rank import (
    DISAGREEMENTS,
    ONE_WAY,
    REDUCTIONS,
    SLOW,
    STRUCK,
    TWO_WAY,
    Call,
    Job,
    Report,
    live,
)
from benchmarks.support import command
from pycomm.bench.support import summaries
from pycomm.testing import FaultPlan, run_ranks

TINY, LARGE = 24, 600_000  # elements of float32, of 2, 3 and 4 ranks
GRAINS = {TINY: 1, LARGE: 997}
"""Bytes that a throttle delivers at once: each such chunk costs a sleep and a wake-up."""
TRANSPORTS = ("shm", "tcp")
MOMENTS: dict[str, tuple[str, ...]] = {
    "kill": ("idle", "start", "middle", "meanwhile", "forming", "closing"),
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
    **dict.fromkeys(SLOW, ("start",)),
    # Another call differs from its start.
    **dict.fromkeys(DISAGREEMENTS, ("idle",)),
}
PROCESSES = ("kill", "stop", "exit", "exception")
ENDS = (*PROCESSES, "abort", "disconnect", "corrupt")
"""After these a rank is lost; DISAGREEMENTS raise Mismatch; slow ones no error."""
MOST_BYTES = 400_000  # transferred before a fault of the transport at a random moment
HEARTBEAT_S = 1.0
AT_ONCE_MS = 1000.0
LIMIT_S = 30.0


def calls(action: str, moment: str) -> list[Call]:
    """The calls that can have the fault at this moment."""
    if moment in ("forming", "closing"):  # no call is in progress
        return [Call("all_reduce", TINY), Call("all_reduce", LARGE)]
    verbs: Iterable[str] = (*TWO_WAY, *ONE_WAY)
    if action == "wrong op":
        verbs = REDUCTIONS
    elif action == "wrong root":
        verbs = ONE_WAY
    elif action == "wrong count":  # those of all_gather_v may differ
        verbs = (verb for verb in verbs if verb != "all_gather_v")
    # It carries no data, it replaces the call, and the first barrier would be hit.
    if action in ("wrong count", "wrong dtype", "skip") or moment in ("start", "middle"):
        verbs = (verb for verb in verbs if verb != "barrier")
    return [Call(v, n) for v in verbs for n in (TINY, LARGE) if (v, n) != ("barrier", LARGE)]


def matrix(
    actions: Iterable[str] = MOMENTS, transports: Iterable[str] = TRANSPORTS
) -> Iterator[Job]:
    """All cells of these kinds."""
    for action in actions:
        for transport in transports:
            for moment in MOMENTS[action]:
                for call in calls(action, moment):
                    yield Job(action, moment, call, transport, action in PROCESSES)


def run(job: Job) -> list[Report]:
    """Runs a job; returns the observations by rank."""
    with tempfile.TemporaryDirectory() as folder:
        results = run_ranks(
            job.ranks,
            live,
            job,
            folder,
            transport=job.transport,
            processes=job.processes,
            timeout_s=LIMIT_S,
            heartbeat_s=HEARTBEAT_S,
            reproducible=job.reproducible,
            faults=_plans(job, f"{folder}/{STRUCK}"),
            exit_timeout_s=2 * LIMIT_S,  # survivors continue
            return_exceptions=True,
        )
    return [one if isinstance(one, Report) else Report().see(one) for one in results]


def _plans(job: Job, stamp: str) -> list[FaultPlan]:
    """The fault plan of the transport, if the transport injects the fault."""
    fault, call = (job.victim, job.action), job.call
    match job.moment:
        case "start" if job.action in SLOW:
            grain, ranks = GRAINS[call.count], range(job.ranks)
            return [FaultPlan(r, job.action, seconds=0.002, chunk_bytes=grain) for r in ranks]
        case "forming":
            return [FaultPlan(*fault)]
        case "any bytes":
            after = Random(job.seed).randrange(MOST_BYTES)
            return [FaultPlan(*fault, after_bytes=after, timestamp_file=stamp)]
        case "start" | "middle":
            after = 0 if job.moment == "start" else 4 * call.count // 2
            operation = "all_gather" if call.verb == "all_gather_v" else call.verb
            return [FaultPlan(*fault, operation, after, timestamp_file=stamp)]
    return []


def broken(job: Job, reports: Sequence[Report]) -> list[str]:
    """The violated guarantees."""
    wrong = []
    for rank, one in enumerate(reports):
        if rank == job.victim and job.action in ENDS:
            continue  # it left, or got the error that others take it for lost
        found = [*one.complaints, complaint(job, one)]
        wrong += [f"rank {rank}: {what}" for what in found if what]
    return wrong


def complaint(job: Job, one: Report) -> str:
    """The violation in a rank's observations, or ""."""
    raised, wanted = f"{one.error}: {one.text}" if one.error else "nothing", _wanted(job)
    # Perhaps fewer bytes passed than the fault waits for.
    missed = job.moment == "any bytes" and not one.error
    found = {
        f"{one.wrong} elements are not what they should be, and {raised} was raised": one.wrong
        and (job.call.verb not in ONE_WAY or "undefined" not in one.text),
        f"{wanted or 'nothing'} was expected, not {raised}": one.error != wanted and not missed,
        "the group was no longer usable": not one.usable,
    }
    if wanted in ("PeerLost", "GroupBroken") and not missed:
        limit_ms = AT_ONCE_MS + (1e3 * HEARTBEAT_S if job.action == "stop" else 0.0)
        named = one.peer == job.victim and f"rank {job.victim} " in one.text
        found[f"rank {job.victim} is not named: {raised}"] = not named
        found[f"reported after {one.noticed_ms:.0f} ms: {raised}"] = one.noticed_ms > limit_ms
    if job.after and job.action in ("kill", "stop", "exit"):
        others = tuple(rank for rank in range(job.ranks) if rank != job.victim)
        found[f"it continued with {one.survivors}, not with {others}"] = one.survivors != others
    return next((what for what, true in found.items() if true), "")


def _wanted(job: Job) -> str:
    """The class of the guaranteed error, "" for none."""
    if job.action in ("", *SLOW) or job.moment == "closing":
        return ""
    if job.action in ("exception", "abort"):
        return "GroupBroken"  # the launcher aborts the group with the reason
    return "PeerLost" if job.action in ENDS else "Mismatch"


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("faults", __doc__)
    for name, known in (("actions", MOMENTS), ("transports", TRANSPORTS)):
        parser.add_argument(f"--{name}", nargs="+", choices=known, default=known, help="(all)")
    options = parser.parse_args(argv)
    found: dict[tuple[str, str], list[tuple[str, list[float]]]] = collections.defaultdict(list)
    cells = list(matrix(options.actions, options.transports))
    for number, cell in enumerate(command.progress(cells, "fault injection")):
        job = replace(cell, seed=number)
        reports = run(job)
        if wrong := "; ".join(broken(job, reports)):
            command.CONSOLE.print(f"{job}\n    {wrong}")
        gone = job.victim if job.processes else None  # it has seen nothing
        noticed = [one.noticed_ms for rank, one in enumerate(reports) if one.error and rank != gone]
        found[job.action, job.transport].append((wrong, noticed))
    rows = [
        {
            "action": action,
            "transport": transport,
            "cells": len(of),
            "violations": sum(wrong != "" for wrong, _ in of),
            "noticed_ms": summaries.summarize(ms for _, noticed in of for ms in noticed),
        }
        for (action, transport), of in found.items()
    ]
    violations = [wrong for of in found.values() for wrong, _ in of if wrong]
    command.report(options.json, rows=rows, violations=violations)
    return 1 if violations else 0
