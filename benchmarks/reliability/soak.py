"""`python -m benchmarks soak`: an hour of random calls with injected faults.

In each epoch a group forms, makes random calls (verb, dtype, op, size, root; in subgroups of
split(), on shared arrays) and has one fault or none. Every result is compared with the right one,
every fault's outcome with the guarantees of docs/errors.md. After each epoch this process must hold
no more resources than before: descriptors, threads, children, mappings, files. The printed seed
determines everything: --seed with --first repeats an epoch. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import contextlib
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from typing import Any

from benchmarks.reliability import command, faults
from benchmarks.reliability.fault_rank import DISAGREEMENTS, STRUCK, Call, Job, seen_of
from benchmarks.reliability.faults import Cell
from benchmarks.reliability.leak_check import leaked, memory_mb, one_arena, resources
from benchmarks.reliability.soak_rank import CALLS, SLOW, Report, live
from pycomm.testing import FaultPlan, run_ranks

OF_PROCESSES = ("kill", "stop", "exception")
OF_TRANSPORTS = ("disconnect", "corrupt", *SLOW)
FAULTS = ("", *OF_PROCESSES, *OF_TRANSPORTS, "abort", *DISAGREEMENTS)
COUNTS = (12, 120_000)  # elements of float32 in the calls with the fault: of 2, 3 and 4 ranks
MOST_BYTES = 400_000  # transferred before a fault of the transport
GROWTH_MB = 8  # of this process's memory, beyond what the first epochs keep
WARM = 20  # epochs


@dataclass(frozen=True)
class Epoch:
    """The setting of an epoch."""

    job: Job  # its fault; "" for none
    moment: int  # in which call; -1: in the transport
    ranks: int
    transport: str
    processes: bool
    reproducible: bool
    after_bytes: int  # of a fault of the transport

    def __str__(self) -> str:
        job, kind = self.job, "processes" if self.processes else "threads"
        what = f"{job.action or 'nothing'} on rank {job.victim} in call {self.moment}"
        return f"{self.ranks} {kind}, {self.transport}, {what}"


@dataclass
class Tally:
    """Counters of the run, and its failures."""

    epochs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    worst_ms: dict[str, float] = field(default_factory=dict)  # to a survivor's error, by fault
    complaints: list[str] = field(default_factory=list)

    def add(self, where: Epoch, outcomes: Sequence[Any]) -> None:
        """Counts an epoch."""
        fault, victim = where.job.action or "nothing", where.job.victim
        self.epochs += 1
        self.faults[fault] += 1
        self.transports[f"{where.transport}, {'processes' if where.processes else 'threads'}"] += 1
        for rank, one in enumerate(outcomes):
            if not isinstance(one, Report):
                continue
            self.calls += one.calls
            self.bytes += one.bytes
            if one.seen.error and fault not in DISAGREEMENTS and rank != victim:
                self.worst_ms[fault] = max(self.worst_ms.get(fault, 0.0), one.seen.noticed_ms)


def epoch_of(seed: int, number: int, folder: str) -> Epoch:
    """The epoch of this number."""
    drawn = random.Random(f"{seed}/{number}")
    fault = drawn.choice(FAULTS)
    # Half of the ranks continue only if they have the lowest rank; two ranks that each wait for the
    # other as the root have no third rank to report the mismatch.
    more = fault in (*OF_PROCESSES, "disconnect", "wrong root")
    ranks = drawn.choice((3, 4) if more else (2, 3, 4))
    processes = fault in OF_PROCESSES or drawn.randrange(6) == 0
    transport = drawn.choice(("shm", "tcp") if processes else ("local", "shm", "tcp"))
    victim = drawn.randrange(1 if fault == "wrong root" else 0, ranks)  # 0 is the right root
    moment = -1 if fault in ("", *OF_TRANSPORTS) else drawn.randrange(CALLS)
    cells = faults.matrix([fault], [""], ["tiny"], [str(ranks)]) if moment >= 0 else ()
    verbs = [c.verb for c in cells if c.moment == "idle" and not c.left_out()]
    call = Call(drawn.choice(verbs or [""]), drawn.choice(COUNTS))
    job = Job(call, victim, fault, "idle", folder, drawn.randrange(10**9))
    after = 0 if fault in SLOW else drawn.randrange(MOST_BYTES)
    return Epoch(job, moment, ranks, transport, processes, drawn.randrange(4) == 0, after)


def play(where: Epoch) -> list[Any]:
    """By rank: its Report, or its error."""
    job, plans = where.job, []
    if job.action in OF_TRANSPORTS:
        stamp = f"{job.folder}/{STRUCK}"
        fault = (job.victim, job.action, None, where.after_bytes)
        plans = [FaultPlan(*fault, seconds=0.002, timestamp_file=stamp)]
    return run_ranks(
        where.ranks,
        live,
        job,
        where.moment,
        transport=where.transport,
        processes=where.processes,
        timeout_s=faults.LIMIT_S,
        heartbeat_s=faults.HEARTBEAT_S,
        reproducible=where.reproducible,
        faults=plans,
        exit_timeout_s=2 * faults.LIMIT_S,  # survivors continue
        return_exceptions=True,
    )


def judged(where: Epoch, outcomes: Sequence[Any], late_ms: float) -> list[str]:
    """The failures of an epoch."""
    job, wrong = where.job, []
    cell = Cell(job.action or SLOW[0], "idle", job.call.verb, "tiny", "", where.ranks)
    survivors = tuple(r for r in range(where.ranks) if r != job.victim)
    for rank, answer in enumerate(outcomes):
        if rank == job.victim and job.action in faults.ENDS:
            continue  # it left, or got the error that others take it for lost
        one = answer if isinstance(answer, Report) else Report(seen=seen_of(answer))
        found = list(one.complaints)
        # Perhaps fewer bytes passed than a fault of the transport waits for.
        if one.seen.error or job.action not in ("disconnect", "corrupt"):
            found.append(faults.complaint(cell, job.victim, one.seen, late_ms))
        if job.action in ("kill", "stop") and one.survivors != survivors:
            found.append(f"it continued with {one.survivors}, not with {survivors}")
        wrong += [f"rank {rank}: {complaint}" for complaint in found if complaint]
    return wrong


def soak(
    tally: Tally, seed: int, numbers: Iterable[int], late_ms: float = faults.AT_ONCE_MS
) -> None:
    """Runs the epochs of these numbers."""
    warm_mb = 0.0
    resource_tracker.ensure_running()  # multiprocessing keeps it until the process ends
    one_arena()
    for number in numbers:
        before = resources()
        with tempfile.TemporaryDirectory() as folder:
            where = epoch_of(seed, number, folder)
            outcomes = play(where)
        wrong = judged(where, outcomes, late_ms)
        tally.add(where, outcomes)
        del outcomes
        if more := leaked(before):
            wrong.append(f"left behind: {more}")
        if tally.epochs == WARM:
            warm_mb = memory_mb()
        elif tally.epochs > WARM and (now_mb := memory_mb()) > warm_mb + GROWTH_MB:
            wrong.append(f"memory has grown from {warm_mb:.0f} to {now_mb:.0f} MB")
        for complaint in (f"epoch {number} ({where}): {what}" for what in wrong):
            command.CONSOLE.print(complaint, markup=False)
            tally.complaints.append(complaint)


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("soak", __doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="of an earlier run (default: a new one)")
    parser.add_argument("--first", type=int, default=0, help="the first epoch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10**9, help="at most so many")
    parser.add_argument(
        "--late-ms", type=float, default=faults.AT_ONCE_MS,
        help="latest detection of a loss beyond the heartbeat's limit (%(default)s)",
    )  # fmt: skip
    options = parser.parse_args(argv)
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    command.CONSOLE.print(f"seed {seed}")
    start, tally = time.monotonic(), Tally()
    every = range(options.first, options.first + options.epochs)
    numbers = command.timed(every, options.minutes, "epochs")
    # After Ctrl-C the results so far are stored; closing ends the progress bar first.
    with contextlib.suppress(KeyboardInterrupt), contextlib.closing(numbers):
        soak(tally, seed, numbers, options.late_ms)
    command.report(
        options.json,
        seed=seed,
        first=options.first,
        minutes=round((time.monotonic() - start) / 60, 1),
        late_ms=options.late_ms,
        **vars(tally),
        calls_in_all=tally.calls.total(),
    )
    return 1 if tally.complaints else 0
