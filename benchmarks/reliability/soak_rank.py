"""A rank in one epoch of the soak (soak.py), and its report.

All ranks draw the same calls from the same seed. Element i of what rank r brings to a call with
salt s is (3 i + 5 r + s) mod 7, exact in every dtype, so every right result is known without
another run. Ranks are threads or processes.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from benchmarks.reliability.fault_rank import (
    DISAGREEMENTS,
    STRUCK,
    UNTOUCHED,
    Call,
    Raised,
    Seen,
    differing,
    made,
    shapes,
)
from pycomm import Group, errors

Array = Any  # of NumPy

REDUCTIONS = ("all_reduce", "reduce_scatter")
TWO_WAY = (*REDUCTIONS, "all_gather", "all_to_all")
ONE_WAY = ("reduce", "broadcast", "gather", "scatter")
VERBS = (*TWO_WAY, *ONE_WAY, "all_gather_v", "barrier", "messages")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
ROWS = (1, 5, 100, 3_000, 60_000)  # elements for each rank
SLOW_ROWS = ROWS[:3]  # where bytes arrive one at a time
SLOW = ("delay", "throttle")
SHRINK_S = 30.0


@dataclass(frozen=True)
class Epoch:
    """The parameters of an epoch for its ranks."""

    seed: str
    ranks: int
    calls: int
    fault: str  # "", or one of soak.py's FAULTS
    victim: int
    moment: int  # in which call
    folder: str  # for files shared by the ranks; the same on all


@dataclass
class Report:
    """The report of a rank."""

    calls: Counter[str] = field(default_factory=Counter)
    bytes: int = 0
    seen: Seen = field(default_factory=Seen)
    complaints: list[str] = field(default_factory=list)
    survivors: tuple[int, ...] = ()  # the ranks with which it continued


class _Drawing:
    """The calls of an epoch, the same on every rank."""

    def __init__(self, epoch: Epoch) -> None:
        self._random = random.Random(epoch.seed)
        self._rows = SLOW_ROWS if epoch.fault in SLOW else ROWS

    def call(self, size: int, verbs: tuple[str, ...] = VERBS) -> Call:
        drawn = self._random
        return Call(
            drawn.choice(verbs),
            size * drawn.choice(self._rows),
            drawn.choice(DTYPES),
            drawn.choice(("sum", "max", "min")),
            drawn.randrange(size),
        )

    def salt(self) -> int:
        return self._random.randrange(7)

    def chance(self, one_in: int) -> bool:
        return self._random.randrange(one_in) == 0

    def colors(self, size: int) -> list[int]:
        return [self._random.randrange(2) for _ in range(size)]


def given(call: Call, rank: int, size: int, salt: int) -> Array:
    """The input of a rank to a call."""
    shape = shapes(call, size)[0]
    i = np.arange(np.prod(shape, dtype=np.int64)).reshape(shape)
    return ((3 * i + 5 * rank + salt) % 7).astype(call.dtype)


def wanted(call: Call, rank: int, size: int, salt: int) -> tuple[Array, Array | None]:
    """The expected contents of a rank's input and output after a call."""
    inputs = [given(call, r, size, salt) for r in range(size)]
    taken = shapes(call, size)[1]
    x, out = inputs[rank], None if taken is None else np.full(taken, UNTOUCHED, call.dtype)
    by: Any = {"sum": np.sum, "max": np.max, "min": np.min}[call.op]
    match call.verb:
        case "all_reduce":
            x = by(np.stack(inputs), axis=0)
        case "reduce" if rank == call.root:
            x = by(np.stack(inputs), axis=0)
        case "broadcast":
            x = inputs[call.root]
        case "reduce_scatter":
            out = by(np.stack(inputs), axis=0)[rank]
        case "scatter":
            out = inputs[call.root][rank]
        case "all_to_all":
            out = np.stack([one[rank] for one in inputs])
        case "all_gather" | "all_gather_v":
            out = np.stack(inputs)
        case "gather" if rank == call.root:
            out = np.stack(inputs)
        case "messages":
            x = inputs[(rank - 1) % size]
    return x, out


def _arrays(call: Call, group: Group, salt: int, shared: bool) -> tuple[Array, Array | None]:
    x = given(call, group.rank, group.size, salt)
    if shared and x.size:
        held = pycomm.empty(x.shape, x.dtype)
        held[...] = x
        x = held
    taken = shapes(call, group.size)[1]
    return x, None if taken is None else np.full(taken, UNTOUCHED, call.dtype)


def _made(call: Call, group: Group, x: Array, out: Array | None) -> None:
    if call.verb != "messages":
        made(call, group, x, out)
    elif group.size > 1:
        pycomm.send(x, (group.rank + 1) % group.size, group=group)
        pycomm.recv(x, (group.rank - 1) % group.size, group=group)


def _go(group: Group, call: Call, drawing: _Drawing, report: Report) -> None:
    """Makes a call and checks its result."""
    salt, shared = drawing.salt(), drawing.chance(4)
    held = _arrays(call, group, salt, shared)
    _made(call, group, *held)
    report.calls[call.verb] += 1
    report.bytes += held[0].nbytes
    if wrong := differing(held, wanted(call, group.rank, group.size, salt)):
        report.complaints.append(f"{wrong} elements are wrong after {call} on {group!r}")


def live(group: Group, epoch: Epoch) -> Report:
    """One epoch: calls, the fault of this rank or another, and the recovery."""
    report, drawing = Report(), _Drawing(epoch)
    try:
        pycomm.barrier(group=group)  # forming is complete on every rank
        for number in range(epoch.calls):
            if number == epoch.moment and epoch.fault:
                _meet(group, epoch, drawing, report)
            elif drawing.chance(8):
                _split(group, drawing, report)
            else:
                _go(group, drawing.call(group.size), drawing, report)
        pycomm.barrier(group=group)  # no rank leaves while others wait
    except errors.Error as error:  # an expected outcome of a fault
        noticed_ms = 1e3 * (time.monotonic() - _struck(epoch))
        report.seen = Seen(type(error).__name__, str(error), error.peer, noticed_ms)
        _go_on(group, epoch, drawing, report)
    return report


def _split(group: Group, drawing: _Drawing, report: Report) -> None:
    part = group.split(drawing.colors(group.size)[group.rank])
    assert part is not None
    for verb in ("all_reduce", "all_gather"):  # with parts of unequal sizes
        _go(part, Call(verb, 12), _Drawing(_PART), report)
    part.close()
    report.calls["split"] += 1


def _meet(group: Group, epoch: Epoch, drawing: _Drawing, report: Report) -> None:
    """The call in which the fault happens."""
    mine = group.rank == epoch.victim
    call = replace(drawing.call(group.size, _fitting(epoch.fault)), dtype="float32", root=0)
    call = replace(call, op="sum")
    if epoch.fault in DISAGREEMENTS or epoch.fault == "skip":
        _disagree(group, epoch, call, report)
    elif mine:
        _strike(group, epoch)
    else:
        _go(group, call, _Drawing(epoch), report)


def _fitting(fault: str) -> tuple[str, ...]:
    return {"wrong op": REDUCTIONS, "wrong root": ONE_WAY}.get(fault, TWO_WAY)


def _disagree(group: Group, epoch: Epoch, call: Call, report: Report) -> None:
    """All ranks report it (if data flows one way, at the barrier), and no array changes unless the
    error says so. The group continues."""
    if group.rank == epoch.victim and epoch.fault == "skip":
        call = Call("barrier", group.size)
    elif group.rank == epoch.victim:
        call = DISAGREEMENTS[epoch.fault](call, group.size)
    held, before = (_arrays(call, group, 0, shared=False) for _ in range(2))
    try:
        _made(call, group, *held)
        pycomm.barrier(group=group)
        report.complaints.append(f"this rank got no error for {epoch.fault!r}")
    except errors.Mismatch as error:  # the expected outcome
        report.seen = Seen("Mismatch", str(error), error.peer)
        if differing(held, before) and "undefined" not in str(error):
            report.complaints.append(f"{epoch.fault!r} changed an array")


def _strike(group: Group, epoch: Epoch) -> None:
    Path(epoch.folder, STRUCK).write_text(str(time.monotonic()))
    match epoch.fault:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            while True:  # a SIGCONT does not end it
                os.kill(os.getpid(), signal.SIGSTOP)
        case "exception":
            raise Raised("by itself")
        case "abort":
            group.abort(REASON)
            pycomm.barrier(group=group)


REASON = "aborted by the soak"
_PART = Epoch("part", 1, 0, "", 0, 0, "")


def _struck(epoch: Epoch) -> float:
    """When, as stored by the victim or its transport; now if there was no fault."""
    with contextlib.suppress(FileNotFoundError):
        return float(Path(epoch.folder, STRUCK).read_text())
    return time.monotonic()


def _go_on(group: Group, epoch: Epoch, drawing: _Drawing, report: Report) -> None:
    """After a loss the others continue without the victim."""
    if epoch.fault not in ("kill", "stop", "disconnect") or group.rank == epoch.victim:
        return
    try:
        rest = group.shrink(SHRINK_S)
        report.survivors = tuple(rest.ranks)
        drawn = _Drawing(replace(epoch, seed=epoch.seed + " after"))
        for _ in range(5):
            _go(rest, drawn.call(rest.size), drawn, report)
        pycomm.barrier(group=rest)
        rest.close()
    except errors.Error as error:  # reported as a failure; the soak continues
        report.complaints.append(f"after the loss: {type(error).__name__}: {error}")
    finally:
        _bury(group, epoch)


def _bury(group: Group, epoch: Epoch) -> None:
    """Kills a stopped victim after all others have continued, so that the epoch ends."""
    Path(epoch.folder, f"on{group.rank}").touch()
    if epoch.fault == "stop" and len(list(Path(epoch.folder).glob("on*"))) == group.size - 1:
        with contextlib.suppress(ProcessLookupError):
            os.kill(group.peer_info()[epoch.victim].pid, signal.SIGKILL)
