"""A rank in one cell of the fault matrix (faults.py), and its observations.

All arrays of rank r hold r + 1, and outputs hold UNTOUCHED, so every right result is known without
another run, and every byte that an error changed is detected. Ranks are threads or processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from pycomm import Group, errors

Array = Any  # of NumPy

UNTOUCHED = 99
CALLS = 3  # of the cell's verb; the fault happens in the second
MOST_CALLS = 100_000  # for a fault at a random moment
STRUCK = "struck"  # the file in which the victim, or its transport, stores the time


class Raised(Exception):
    """The exception of a victim that fails by raising."""


@dataclass(frozen=True)
class Call:
    """One call, as a rank makes it."""

    verb: str
    count: int  # of each rank's array; a multiple of the number of ranks
    dtype: str = "float32"
    op: str = "sum"
    root: int = 0


@dataclass(frozen=True)
class Job:
    """The parameters of a cell for its ranks."""

    call: Call
    victim: int
    action: str
    moment: str
    folder: str  # for files shared by the ranks; the same on all
    seed: int = 0


@dataclass(frozen=True)
class Seen:
    """The observations of a rank."""

    error: str = ""  # class, "" for none
    text: str = ""
    peer: int | None = None
    noticed_ms: float = 0.0  # from the fault or, if its time is unknown, from the start of the call
    wrong: int = 0  # wrong results, or bytes that a disagreement changed
    usable: bool = True  # after a disagreement: a right call gives the right result


def shapes(call: Call, size: int) -> tuple[tuple[int, ...], tuple[int, ...] | None]:
    """Shapes of a rank's input, and of its output if that is another array."""
    row = call.count // size
    if call.verb in ("all_gather", "all_gather_v", "gather"):
        return (call.count,), (size, call.count)
    if call.verb == "all_to_all":
        return (size, row), (size, row)
    if call.verb in ("reduce_scatter", "scatter"):
        return (size, row), (row,)
    return (call.count,), None


def arrays(call: Call, group: Group) -> tuple[Array, Array | None]:
    """A rank's input and output before the call."""
    given, taken = shapes(call, group.size)
    out = None if taken is None else np.full(taken, UNTOUCHED, call.dtype)
    return np.full(given, group.rank + 1, call.dtype), out


def made(call: Call, group: Group, x: Array, out: Array) -> None:
    """The call itself, with its results in `x` or `out`."""
    match call.verb:
        case "all_reduce":
            pycomm.all_reduce(x, call.op, group=group)
        case "reduce":
            pycomm.reduce(x, call.root, call.op, group=group)
        case "broadcast":
            pycomm.broadcast(x, call.root, group=group)
        case "all_gather":
            pycomm.all_gather(x, out, group=group)
        case "gather":
            pycomm.gather(x, call.root, out if group.rank == call.root else None, group=group)
        case "all_gather_v":
            pycomm.all_gather_v(x, list(out), group=group)
        case "reduce_scatter":
            pycomm.reduce_scatter(x, call.op, out, group=group)
        case "scatter":
            pycomm.scatter(x, call.root, out, group=group)
        case "all_to_all":
            pycomm.all_to_all(x, out, group=group)
        case "barrier":
            pycomm.barrier(group=group)
        case verb:
            raise ValueError(verb)


def result(call: Call, group: Group) -> tuple[Array, Array | None]:
    """The contents of a rank's arrays after a correct call of all ranks, with "sum" or "max"."""
    x, out = arrays(call, group)
    ranks = np.arange(1, group.size + 1)
    reduced = ranks.sum() if call.op == "sum" else group.size
    at_root = group.rank == call.root
    if call.verb == "all_reduce" or (call.verb == "reduce" and at_root):
        x[...] = reduced
    elif call.verb == "broadcast":
        x[...] = call.root + 1
    elif call.verb == "reduce_scatter" and out is not None:
        out[...] = reduced
    elif call.verb == "scatter" and out is not None:
        out[...] = call.root + 1
    elif out is not None and (call.verb != "gather" or at_root):
        out.reshape(group.size, -1)[...] = ranks[:, None]
    return x, out


def differing(got: tuple[Array, Array | None], wanted: tuple[Array, Array | None]) -> int:
    """How many elements."""
    pairs = [(a, b) for a, b in zip(got, wanted, strict=True) if a is not None and b is not None]
    return sum(int(np.count_nonzero(a != b)) for a, b in pairs)


def rank_sees(group: Group, job: Job) -> Seen:
    """Makes the calls until one fails. Checks the arrays after a disagreement."""
    mine = job.call
    start = time.monotonic()
    held = arrays(job.call, group)
    wrong = 0
    try:
        pycomm.barrier(group=group)  # forming is complete on every rank
        if job.moment == "meanwhile" and group.rank == job.victim:
            _at_random(job)
        for turn in range(MOST_CALLS if job.moment == "meanwhile" else CALLS):
            if group.rank == job.victim and turn == 1:
                mine = _strike(group, job)
            held = arrays(mine, group)
            start = time.monotonic()
            made(mine, group, *held)
            wrong += differing(held, result(mine, group))
            mine = job.call
        pycomm.barrier(group=group)  # ranks without an error so far get it here
    except errors.Error as error:  # the expected outcome
        noticed_ms = 1e3 * (time.monotonic() - _struck(job, start))
        seen = Seen(type(error).__name__, str(error), error.peer, noticed_ms, wrong)
        if isinstance(error, errors.Mismatch):
            seen = replace(seen, wrong=differing(held, arrays(mine, group)), usable=_usable(group))
        _bury(group, job)
        return seen
    if job.moment == "closing" and group.rank == job.victim:
        _end(job)
    return Seen(wrong=wrong)


DISAGREEMENTS: dict[str, Callable[[Call, int], Call]] = {
    "wrong operation": lambda call, size: replace(
        call, verb="all_reduce" if call.verb != "all_reduce" else "all_gather"
    ),
    "wrong count": lambda call, size: replace(call, count=call.count + size),
    "wrong dtype": lambda call, size: replace(call, dtype="int32"),
    "wrong op": lambda call, size: replace(call, op="max"),
    "wrong root": lambda call, size: replace(call, root=1),
}


def _strike(group: Group, job: Job) -> Call:
    """The call of the victim instead of its second call, unless it ends here."""
    if job.action in DISAGREEMENTS:
        return DISAGREEMENTS[job.action](job.call, group.size)
    if job.action == "skip":
        return Call("barrier", group.size)
    if job.moment == "idle":
        _end(job)
    return job.call


def _end(job: Job) -> None:
    """The victim ends by this action."""
    Path(job.folder, STRUCK).write_text(str(time.monotonic()))
    match job.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "exception":
            raise Raised("by itself")


def _at_random(job: Job) -> None:
    """Ends the victim from another thread, some milliseconds from now."""
    moment_s = random.Random(job.seed).uniform(0.0, 0.03)
    timer = threading.Timer(moment_s, _end, [job])
    timer.daemon = True
    timer.start()


def _struck(job: Job, otherwise: float) -> float:
    try:
        return float(Path(job.folder, STRUCK).read_text())
    except FileNotFoundError:  # no fault: ranks disagree, or the group was forming
        return otherwise


def _usable(group: Group) -> bool:
    """Whether the next call that is right on every rank gives the right result."""
    x = pycomm.all_reduce(np.full(5, group.rank + 1.0), group=group)
    return bool((x == sum(range(1, group.size + 1))).all())


def _bury(group: Group, job: Job) -> None:
    """Kills a stopped victim after all others have reported, so that the cell ends."""
    if job.action != "stop" or group.rank == job.victim:
        return
    Path(job.folder, f"reported{group.rank}").touch()
    if len(list(Path(job.folder).glob("reported*"))) == group.size - 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.peer_info()[job.victim].pid, signal.SIGKILL)
