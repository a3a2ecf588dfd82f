"""`python -m benchmarks soak`: an hour of random calls with injected faults.

In each epoch a group forms, makes random calls (verb, dtype, op, size, root; in subgroups of
split(), on shared arrays) and has one fault or none. Every result is compared with the right one,
every fault's outcome with the guarantees of docs/errors.md. After each epoch this process must hold
no more resources than before: descriptors, threads, children, mappings, files. The printed seed
determines everything: --seed with --first repeats an epoch. Exits with 1 if anything was wrong.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import random
import secrets
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from benchmarks.reliability import faults
from benchmarks.reliability.fault_rank import DISAGREEMENTS, STRUCK, Seen
from benchmarks.reliability.faults import Cell
from benchmarks.reliability.leak_check import leaked, resources
from benchmarks.reliability.soak_rank import REASON, Epoch, Report, live
from pycomm.bench.support import machine, summaries
from pycomm.testing import FaultPlan, run_ranks

OF_PROCESSES = ("kill", "stop", "exception")
OF_TRANSPORTS = ("disconnect", "corrupt", "delay", "throttle")
FAULTS = ("", *OF_PROCESSES, *OF_TRANSPORTS, "abort", "skip", *DISAGREEMENTS)
MOST_BYTES = 400_000  # transferred before a fault of the transport
CALLS = 30  # of an epoch
GROWTH_MB = 8  # of this process's memory, beyond what the first epochs keep
WARM = 20  # epochs


@dataclass(frozen=True)
class Setting:
    """The setting of an epoch."""

    epoch: Epoch
    transport: str
    processes: bool
    reproducible: bool
    plans: tuple[FaultPlan, ...]


@dataclass
class Tally:
    """Counters of the run, and its failures."""

    epochs: int = 0
    calls: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    faults: Counter[str] = field(default_factory=Counter)
    transports: Counter[str] = field(default_factory=Counter)
    worst_ms: dict[str, float] = field(
        default_factory=dict
    )  # until a survivor got its error, by fault
    complaints: list[str] = field(default_factory=list)


M_ARENA_MAX = -8  # of malloc.h


def setting(seed: int, number: int, folder: str) -> Setting:
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
    moment = -1 if fault in OF_TRANSPORTS else drawn.randrange(CALLS)
    after = 0 if fault in ("delay", "throttle") else drawn.randrange(MOST_BYTES)
    epoch = Epoch(f"{seed}/{number} calls", ranks, CALLS, fault, victim, moment, folder)
    plans = (
        [FaultPlan(victim, fault, None, after, seconds=0.002, timestamp_file=f"{folder}/{STRUCK}")]
        if moment < 0
        else []
    )
    return Setting(epoch, transport, processes, drawn.randrange(4) == 0, tuple(plans))


def play(where: Setting) -> list[Any]:
    """The reports by rank: a Story, or the error of the rank."""
    return run_ranks(
        where.epoch.ranks,
        live,
        where.epoch,
        transport=where.transport,
        processes=where.processes,
        timeout_s=faults.LIMIT_S,
        heartbeat_s=faults.HEARTBEAT_S,
        reproducible=where.reproducible,
        faults=where.plans,
        exit_timeout_s=2 * faults.LIMIT_S,  # survivors continue
        return_exceptions=True,
    )


def judged(where: Setting, outcomes: Sequence[Any], late_ms: float) -> list[str]:
    """The failures of an epoch."""
    epoch = where.epoch
    wrong: list[str] = []
    survivors = tuple(r for r in range(epoch.ranks) if r != epoch.victim)
    for rank, answer in enumerate(outcomes):
        if rank == epoch.victim and epoch.fault in faults.ENDS:
            continue  # it left, or got the error that others take it for lost
        one = answer if isinstance(answer, Report) else Report(seen=faults.raised(answer))
        found = [*one.complaints, _broken(epoch, one.seen, late_ms)]
        if epoch.fault in ("kill", "stop") and one.survivors != survivors:
            found.append(f"it continued with {one.survivors}, not with {survivors}")
        wrong += [f"rank {rank}: {complaint}" for complaint in found if complaint]
    return wrong


def _broken(epoch: Epoch, seen: Seen, late_ms: float) -> str:
    """The violated guarantee, or ""."""
    raised = f"{seen.error}: {seen.text}" if seen.error else "nothing"
    match epoch.fault:
        case "" | "delay" | "throttle":
            return "" if not seen.error else f"nothing was expected, not {raised}"
        case "abort":
            kept = seen.error == "GroupBroken" and REASON in seen.text
            return "" if kept else f"GroupBroken with its reason was expected, not {raised}"
        case "disconnect" | "corrupt" if not seen.error:
            return ""  # fewer bytes passed than the fault waits for
    cell = Cell(epoch.fault, "idle", "all_reduce", "tiny", "", epoch.ranks)
    return faults.complaint(cell, epoch.victim, seen, late_ms)


def soak(
    tally: Tally,
    seed: int,
    numbers: Sequence[int],
    late_ms: float = faults.AT_ONCE_MS,
    go_on: Callable[[], bool] = lambda: True,
) -> None:
    """Runs the epochs of these numbers until the time is over."""
    warm_mb = 0.0
    resource_tracker.ensure_running()  # multiprocessing keeps it until the process ends
    one_arena()
    for number in numbers:
        if not go_on():
            return
        before = resources()
        with tempfile.TemporaryDirectory() as folder:
            where = setting(seed, number, folder)
            outcomes = play(where)
        wrong = judged(where, outcomes, late_ms)
        _count(tally, where, outcomes)
        del outcomes
        if more := leaked(before):
            wrong.append(f"left behind: {more}")
        if tally.epochs == WARM:
            warm_mb = memory_mb()
        elif tally.epochs > WARM and (now_mb := memory_mb()) > warm_mb + GROWTH_MB:
            wrong.append(f"memory has grown from {warm_mb:.0f} to {now_mb:.0f} MB")
        tally.complaints += [f"epoch {number} ({_named(where)}): {what}" for what in wrong]


def _count(tally: Tally, where: Setting, outcomes: Sequence[Any]) -> None:
    fault = where.epoch.fault or "nothing"
    tally.epochs += 1
    tally.faults[fault] += 1
    tally.transports[f"{where.transport}, {'processes' if where.processes else 'threads'}"] += 1
    for rank, one in enumerate(outcomes):
        if not isinstance(one, Report):
            continue
        tally.calls += one.calls
        tally.bytes += one.bytes
        struck = one.seen.error and fault in (*OF_PROCESSES, "disconnect", "corrupt", "abort")
        if struck and rank != where.epoch.victim:
            tally.worst_ms[fault] = max(tally.worst_ms.get(fault, 0.0), one.seen.noticed_ms)


def _named(where: Setting) -> str:
    epoch = where.epoch
    kind = "processes" if where.processes else "threads"
    what = f"{epoch.fault or 'nothing'} on rank {epoch.victim} in call {epoch.moment}"
    return f"{epoch.ranks} {kind}, {where.transport}, {what}"


def one_arena() -> None:
    """Lets malloc serve new threads from one arena. Other arenas keep free memory, even after a
    trim: tens of megabytes within minutes, which would look like a leak."""
    ctypes.CDLL(None).mallopt(M_ARENA_MAX, 1)


def memory_mb() -> float:
    """The memory of this process, without the free memory of malloc."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    _, resident, shared, *_ = (int(n) for n in Path("/proc/self/statm").read_text().split())
    return (resident - shared) * os.sysconf("SC_PAGE_SIZE") / 2**20


def main(argv: Sequence[str]) -> int:
    """Runs, prints, stores; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm bench soak", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--minutes", type=float, default=60.0, help="(%(default)s)")
    parser.add_argument("--seed", type=int, help="of an earlier run (default: a new one)")
    parser.add_argument("--first", type=int, default=0, help="the first epoch (%(default)s)")
    parser.add_argument("--epochs", type=int, default=10**9, help="at most so many")
    parser.add_argument(
        "--late-ms", type=float, default=faults.AT_ONCE_MS,
        help="latest detection of a loss beyond the heartbeat's limit (%(default)s)",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, help="where to store what was counted")
    options = parser.parse_args(argv)
    seed = secrets.randbelow(10**9) if options.seed is None else options.seed
    console = Console(soft_wrap=True, highlight=False)
    console.print(f"seed {seed}")
    start = time.monotonic()
    limit_s: float = 60.0 * options.minutes
    tally, printed = Tally(), 0
    with Progress(console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=limit_s)

        def go_on() -> bool:
            nonlocal printed
            for complaint in tally.complaints[printed:]:
                console.print(complaint, markup=False)
            printed = len(tally.complaints)
            passed_s = time.monotonic() - start
            bar.update(task, completed=passed_s, description=f"{tally.epochs} epochs")
            return passed_s < limit_s

        try:
            numbers = range(options.first, options.first + options.epochs)
            soak(tally, seed, numbers, options.late_ms, go_on)
        except KeyboardInterrupt:  # the results so far are stored
            console.print("interrupted")
        go_on()
    minutes = (time.monotonic() - start) / 60
    content = {
        "machine": machine.describe(),
        "seed": seed,
        "first": options.first,
        "minutes": round(minutes, 1),
        "late_ms": options.late_ms,
        **vars(tally),
        "calls_in_all": tally.calls.total(),
    }
    console.print(_summary(tally, minutes))
    if options.json:
        summaries.write(options.json, content)
    return 1 if tally.complaints else 0


def _summary(tally: Tally, minutes: float) -> str:
    worst = ", ".join(f"{name} {ms:.0f} ms" for name, ms in sorted(tally.worst_ms.items()))
    happened = ", ".join(f"{name} {n}" for name, n in sorted(tally.faults.items()))
    return (
        f"{tally.epochs} epochs in {minutes:.1f} minutes: {tally.calls.total():,} calls, "
        f"{tally.bytes / 2**20:,.0f} MB sent; {happened}\n"
        f"detected after at most: {worst}\n{len(tally.complaints)} complaints"
    )
