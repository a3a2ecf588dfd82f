"""`python -m benchmarks soak`: an hour of random calls with injected faults.

In each epoch a group forms, makes random calls (verb, dtype, op, size, root; in subgroups of
split(), on shared arrays) and has one fault or none. Every result is compared with the right one,
every fault's outcome with the guarantees of docs/errors.md. After each epoch this process must hold
no more resources than before: descriptors, threads, children, mappings, files. The printed seed
determines everything: --seed with --first repeats an epoch. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from random import Random

from benchmarks.reliability import faults
from benchmarks.reliability.fault_rank import DISAGREEMENTS, Job
from benchmarks.reliability.faults import MOMENTS, PROCESSES
from benchmarks.support import command
from benchmarks.support.leak_check import leaked, memory_mb, one_arena, resources

ACTIONS = ("", *MOMENTS)
RANDOM_CALLS = 30  # of an epoch
GROWTH_MB = 8  # of this process's memory, beyond what the first epochs keep
WARM = 20  # epochs


@dataclass
class Tally:
    """Counters of the run, and its failures."""

    epochs: int = 0
    calls_in_all: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    worst_ms: dict[str, float] = field(default_factory=dict)  # to a survivor's error, by fault
    complaints: list[str] = field(default_factory=list)


def epoch_of(seed: int, number: int) -> Job:
    """The epoch of this number."""
    drawn = Random(f"{seed}/{number}")
    action = drawn.choice(ACTIONS)
    # Half of the ranks continue only if they have the lowest rank; two ranks that each wait for the
    # other as the root have no third rank to report the mismatch.
    more = action in (*PROCESSES, "disconnect", "wrong root")
    ranks = drawn.choice((3, 4) if more else (2, 3, 4))
    processes = action in PROCESSES or drawn.randrange(6) == 0
    transport = drawn.choice(("shm", "tcp") if processes else ("local", "shm", "tcp"))
    victim = drawn.randrange(1 if action == "wrong root" else 0, ranks)  # 0 is the right root
    moment = MOMENTS[action][0] if action else "idle"
    if action in ("disconnect", "corrupt"):
        moment = "any bytes"
    call, before = drawn.choice(faults.calls(action, moment)), drawn.randrange(RANDOM_CALLS)
    bits, after = drawn.randrange(10**9), RANDOM_CALLS - before
    place = (transport, processes, ranks, victim)
    return Job(action, moment, call, *place, bits, before, after, drawn.randrange(4) == 0)


def soak(tally: Tally, seed: int, numbers: Iterable[int]) -> None:
    """Runs the epochs of these numbers."""
    warm_mb = 0.0
    resource_tracker.ensure_running()  # multiprocessing keeps it until the process ends
    one_arena()
    for number in numbers:
        before, job = resources(), epoch_of(seed, number)
        reports = faults.run(job)
        wrong = faults.broken(job, reports)
        tally.epochs += 1
        tally.faults[job.action or "nothing"] += 1
        for rank, one in enumerate(reports):
            tally.calls_in_all += one.calls
            if one.error and job.action not in DISAGREEMENTS and rank != job.victim:
                worst_ms = max(tally.worst_ms.get(job.action, 0.0), one.noticed_ms)
                tally.worst_ms[job.action] = worst_ms
        del reports
        if more := leaked(before):
            wrong.append(f"left behind: {more}")
        if tally.epochs == WARM:
            warm_mb = memory_mb()
        elif tally.epochs > WARM and (now_mb := memory_mb()) > warm_mb + GROWTH_MB:
            wrong.append(f"memory has grown from {warm_mb:.0f} to {now_mb:.0f} MB")
        for complaint in (f"epoch {number} ({job}): {what}" for what in wrong):
            command.CONSOLE.print(complaint)
            tally.complaints.append(complaint)


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = command.parser("soak", __doc__, minutes=(60.0, ""), first=(0, "the first epoch"))
    parser.add_argument("--seed", type=int, help="of an earlier run (default: a new one)")
    options = parser.parse_args(argv)
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    command.CONSOLE.print(f"seed {seed}")
    start, tally = time.monotonic(), Tally()

    def passed_minutes() -> float:
        return (time.monotonic() - start) / 60

    numbers = itertools.takewhile(
        lambda number: number == options.first or passed_minutes() < options.minutes,
        itertools.count(options.first),
    )
    # After Ctrl-C the results so far are stored.
    with contextlib.suppress(KeyboardInterrupt):
        soak(tally, seed, command.progress(numbers, "epochs"))
    minutes = round(passed_minutes(), 1)
    command.report(options.json, seed=seed, first=options.first, minutes=minutes, **vars(tally))
    return 1 if tally.complaints else 0
