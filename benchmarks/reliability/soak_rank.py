"""A rank in one epoch of the soak (soak.py), and its report. All ranks draw the same calls from the
same seed. Ranks are threads or processes.
"""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random

import pycomm
from benchmarks.reliability.fault_rank import (
    ONE_WAY,
    TWO_WAY,
    Call,
    Job,
    Seen,
    bury,
    differing,
    make_calls,
    seen_of,
    struck,
)
from pycomm import Group, errors

VERBS = (*TWO_WAY, *ONE_WAY, "messages")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
ROWS = (1, 5, 100, 3_000, 60_000)  # elements for each rank
SLOW_ROWS = ROWS[:3]  # where bytes arrive one at a time
SLOW = ("delay", "throttle")
CALLS = 30  # of an epoch
SHRINK_S = 30.0


@dataclass
class Report:
    """The report of a rank."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    seen: Seen = field(default_factory=Seen)
    complaints: list[str] = field(default_factory=list)
    survivors: tuple[int, ...] = ()  # the ranks with which it continued

    def make_random_call(self, group: Group, job: Job, drawn: Random) -> None:
        """Makes a call, sometimes on a shared array, and checks its result."""
        n, rows = group.size, SLOW_ROWS if job.action in SLOW else ROWS
        verb, count, dtype = drawn.choice(VERBS), n * drawn.choice(rows), drawn.choice(DTYPES)
        call = Call(verb, count, dtype, drawn.choice(("sum", "max", "min")), drawn.randrange(n))
        salt, shared = drawn.randrange(11), drawn.randrange(4) == 0
        x, out = call.arrays(group.rank, n, salt)
        if shared:
            private, x = x, pycomm.empty(x.shape, x.dtype)
            x[...] = private
        call.make(group, x, out)
        self.calls[verb] += 1
        self.bytes += x.nbytes
        if wrong := differing((x, out), call.results(group.rank, n, salt)):
            self.complaints.append(f"{wrong} elements are wrong after {call} on {group!r}")


def live(group: Group, job: Job, moment: int) -> Report:
    """One epoch: calls, the fault of this rank or another in call `moment`, and the recovery."""
    report, drawn = Report(), Random(job.seed)
    try:
        pycomm.barrier(group=group)  # forming is complete on every rank
        for number in range(CALLS):
            if number == moment:
                report.seen = make_calls(group, job)
                if report.seen.error not in ("", "Mismatch"):
                    break
            elif drawn.randrange(8) == 0:  # two subgroups, which may have different sizes
                part = group.split([drawn.randrange(2) for _ in range(group.size)][group.rank])
                assert part is not None
                report.make_random_call(part, job, Random(part.size))
                part.close()
                report.calls["split"] += 1
            else:
                report.make_random_call(group, job, drawn)
        else:
            pycomm.barrier(group=group)  # no rank leaves while others wait
    except errors.Error as error:  # of a fault of the transport
        report.seen = seen_of(error, struck(job.folder, time.monotonic()))
    if report.seen.error == "PeerLost" and job.action != "corrupt" and group.rank != job.victim:
        _continue(group, job, report)
    return report


def _continue(group: Group, job: Job, report: Report) -> None:
    """After a loss the others continue without the victim."""
    try:
        rest = group.shrink(SHRINK_S)
        report.survivors = tuple(rest.ranks)
        drawn = Random(job.seed + 1)
        for _ in range(5):
            report.make_random_call(rest, job, drawn)
        pycomm.barrier(group=rest)
        rest.close()
    except errors.Error as error:  # reported as a failure; the soak continues
        report.complaints.append(f"after the loss: {type(error).__name__}: {error}")
    finally:
        if job.action == "stop":
            bury(group, job)
