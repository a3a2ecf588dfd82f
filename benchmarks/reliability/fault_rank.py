"""The ranks of faults.py and soak.py: calls with known results, and a fault of one rank.

Element i of what rank r brings to a call with salt s is (3 i + 5 r + s) mod 11, exact in every
dtype, and outputs hold UNTOUCHED. So every right result is known without another run, and every
byte that an error changed is detected. Ranks are threads or processes.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

import pycomm
from pycomm import Group, errors

Array = Any  # of NumPy
Arrays = tuple[Array, Array | None]
"""The input of a rank, and its output if that is another array."""

REDUCTIONS = ("all_reduce", "reduce", "reduce_scatter")
ONE_WAY = ("broadcast", "reduce", "gather", "scatter")
"""Data flows to or from the root: a rank that is done before the others disagree cannot know."""
TWO_WAY = ("all_reduce", "reduce_scatter", "all_gather", "all_gather_v", "all_to_all", "barrier")
UNTOUCHED = 99
VERBS = (*TWO_WAY, *ONE_WAY, "messages")
DTYPES = ("float32", "float64", "float16", "int32", "int64", "uint8")
ROWS = (1, 5, 100, 3_000, 60_000)  # elements for each rank, in random calls
SLOW = ("delay", "throttle")
SLOW_ROWS = ROWS[:3]  # where bytes arrive one at a time
CALLS = 3  # of the job's call; the fault happens in the second
MOST_CALLS = 100_000  # for a fault at a random moment
STRUCK = "struck"  # the file in which the victim, or its transport, stores the time
SHRINK_S = 30.0


class Raised(Exception):
    """The exception of a victim that fails by raising."""


@dataclass(frozen=True)
class Call:
    """One call, as a rank makes it."""

    verb: str
    count: int  # of each rank's array; a multiple of the number of ranks
    dtype: str = "float32"
    op: Any = "sum"  # the name of a reduction
    root: int = 0

    def arrays(self, rank: int, size: int, salt: int = 0) -> Arrays:
        """A rank's arrays before the call."""
        by_row = self.verb in ("all_to_all", "reduce_scatter", "scatter")
        shape = (size, self.count // size) if by_row else (self.count,)
        x = (3 * np.arange(self.count) + 5 * rank + salt).reshape(shape) % 11
        outputs = {
            **dict.fromkeys(("all_gather", "all_gather_v", "gather"), (size, self.count)),
            **dict.fromkeys(("reduce_scatter", "scatter"), shape[1:]),
            "all_to_all": shape,
        }
        taken = outputs.get(self.verb)
        return x.astype(self.dtype), None if taken is None else np.full(
            taken, UNTOUCHED, self.dtype
        )

    def results(self, rank: int, size: int, salt: int = 0) -> Arrays:
        """The contents of a rank's arrays after the call, if all ranks make it."""
        x, out = self.arrays(rank, size, salt)
        every = np.stack([self.arrays(r, size, salt)[0] for r in range(size)])
        reduced = {"sum": np.add, "max": np.maximum, "min": np.minimum}[self.op].reduce(every)
        match self.verb:
            case "all_reduce":
                x = reduced
            case "reduce" if rank == self.root:
                x = reduced
            case "broadcast":
                x = every[self.root]
            case "reduce_scatter":
                out = reduced[rank]
            case "scatter":
                out = every[self.root][rank]
            case "all_to_all":
                out = every[:, rank]
            case "all_gather" | "all_gather_v":
                out = every
            case "gather" if rank == self.root:
                out = every
            case "messages":
                x = every[(rank - 1) % size]
        return x.astype(self.dtype), out if out is None else out.astype(self.dtype)

    def make(self, group: Group, x: Array, out: Array) -> None:
        """Makes the call, with its results in `x` or `out`."""
        gathered = out if group.rank == self.root else None
        calls: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: pycomm.all_reduce(x, self.op, group=group),
            "reduce": lambda: pycomm.reduce(x, self.root, self.op, group=group),
            "broadcast": lambda: pycomm.broadcast(x, self.root, group=group),
            "all_gather": lambda: pycomm.all_gather(x, out, group=group),
            "gather": lambda: pycomm.gather(x, self.root, gathered, group=group),
            "all_gather_v": lambda: pycomm.all_gather_v(x, list(out), group=group),
            "reduce_scatter": lambda: pycomm.reduce_scatter(x, self.op, out, group=group),
            "scatter": lambda: pycomm.scatter(x, self.root, out, group=group),
            "all_to_all": lambda: pycomm.all_to_all(x, out, group=group),
            "barrier": lambda: pycomm.barrier(group=group),
            "messages": lambda: _pass_around(group, x),
        }
        calls[self.verb]()


def _pass_around(group: Group, x: Array) -> None:
    if group.size > 1:
        pycomm.send(x, (group.rank + 1) % group.size, group=group)
        pycomm.recv(x, (group.rank - 1) % group.size, group=group)


def differing(got: Arrays, wanted: Arrays) -> int:
    """How many elements."""
    pairs = zip(got, wanted, strict=True)
    return sum(int(np.count_nonzero(a != b)) for a, b in pairs if a is not None)


DISAGREEMENTS: dict[str, Callable[[Call, int], Call]] = {
    "wrong operation": lambda call, size: replace(
        call, verb="all_reduce" if call.verb != "all_reduce" else "all_gather"
    ),
    "wrong count": lambda call, size: replace(call, count=call.count + size),
    "wrong dtype": lambda call, size: replace(call, dtype="int32"),
    "wrong op": lambda call, size: replace(call, op="max"),
    "wrong root": lambda call, size: replace(call, root=1),
    "skip": lambda call, size: Call("barrier", size),
}
"""By action: the call of the victim in place of the right one, and the number of ranks."""


@dataclass(frozen=True)
class Job:
    """A run of a group in which one rank has a fault."""

    action: str  # "" for none
    moment: str
    call: Call
    transport: str
    processes: bool
    ranks: int = 3
    victim: int = 2
    seed: int = 0
    before: int = 0  # random calls before those with the fault
    after: int = 0  # and after them
    reproducible: bool = False


@dataclass
class Report:
    """The observations of a rank."""

    error: str = ""  # class, "" for none
    text: str = ""
    peer: int | None = None
    noticed_ms: float = 0.0  # from the fault or, if its time is unknown, from the start of the call
    wrong: int = 0  # wrong results, or elements that a disagreement changed
    usable: bool = True  # after a disagreement: a right call gives the right result
    calls: int = 0  # random ones
    survivors: tuple[int, ...] = ()  # the ranks with which it continued
    complaints: list[str] = field(default_factory=list)

    def see(self, error: BaseException, since_s: float | None = None) -> Report:
        """Adds an error, and how long it took."""
        self.error, self.text = type(error).__name__, str(error)
        self.peer = getattr(error, "peer", None)
        self.noticed_ms = 0.0 if since_s is None else 1e3 * (time.monotonic() - since_s)
        return self

    def make_random_calls(self, group: Group, job: Job, count: int, drawn: Random) -> None:
        """Makes calls, some in subgroups, which may have different sizes, and checks them."""
        for _ in range(count):
            if drawn.randrange(8) > 0:
                self._make_random_call(group, job, drawn)
                continue
            part = group.split([drawn.randrange(2) for _ in range(group.size)][group.rank])
            assert part is not None
            self._make_random_call(part, job, Random(part.size))
            part.close()

    def _make_random_call(self, group: Group, job: Job, drawn: Random) -> None:
        n, rows = group.size, SLOW_ROWS if job.action in SLOW else ROWS
        verb, count, dtype = drawn.choice(VERBS), n * drawn.choice(rows), drawn.choice(DTYPES)
        call = Call(verb, count, dtype, drawn.choice(("sum", "max", "min")), drawn.randrange(n))
        salt, shared = drawn.randrange(11), drawn.randrange(4) == 0
        x, out = call.arrays(group.rank, n, salt)
        if shared:
            private, x = x, pycomm.empty(x.shape, x.dtype)
            x[...] = private
        call.make(group, x, out)
        self.calls += 1
        if wrong := differing((x, out), call.results(group.rank, n, salt)):
            self.complaints.append(f"{wrong} elements are wrong after {call} on {group!r}")

    def make_faulty_calls(self, group: Group, job: Job, folder: str) -> None:
        """Makes the job's calls, with its fault. Checks the arrays after a disagreement."""
        victim, place = group.rank == job.victim, (group.rank, group.size)

        @functools.cache
        def known(call: Call) -> tuple[Arrays, Arrays]:
            return call.arrays(*place), call.results(*place)

        call, start, held = job.call, time.monotonic(), known(job.call)[0]
        if job.moment == "meanwhile" and victim:
            at_s = Random(job.seed).uniform(0.0, 0.03)
            timer = threading.Timer(at_s, strike, [job, group, folder])
            timer.daemon = True
            timer.start()
        try:
            for turn in range(MOST_CALLS if job.moment == "meanwhile" else CALLS):
                call = job.call
                if victim and turn == 1 and job.action in DISAGREEMENTS:
                    call = DISAGREEMENTS[job.action](call, group.size)
                elif victim and turn == 1 and job.moment == "idle":
                    strike(job, group, folder)
                (x, out), right = known(call)
                held = x.copy(), None if out is None else out.copy()
                start = time.monotonic()
                call.make(group, *held)
                self.wrong += differing(held, right)
            pycomm.barrier(group=group)  # ranks that saw no mismatch so far get it here
        except errors.Mismatch as error:  # reported: the ranks' calls differ on purpose
            self.see(error, start)
            self.wrong, self.usable = differing(held, known(call)[0]), _usable(group)


def live(group: Group, job: Job, folder: str) -> Report:
    """A rank of a job. All draw the same random calls; `folder` is for files that they share."""
    report, drawn, victim = Report(), Random(job.seed), group.rank == job.victim
    try:
        pycomm.barrier(group=group)  # forming is complete on every rank
        report.make_random_calls(group, job, job.before, drawn)
        report.make_faulty_calls(group, job, folder)
        report.make_random_calls(group, job, job.after, drawn)
        pycomm.barrier(group=group)  # no rank leaves while others wait
    except errors.Error as error:  # the result of the cell
        report.see(error, _struck(folder))
    if report.error == "PeerLost" and job.after and job.action != "corrupt" and not victim:
        _continue(group, job, report)
    if job.action == "stop" and not victim:
        _bury(group, job, folder)
    if job.moment == "closing" and victim:
        strike(job, group, folder)
    return report


def _continue(group: Group, job: Job, report: Report) -> None:
    """After a loss the others continue without the victim."""
    try:
        rest = group.shrink(SHRINK_S)
        report.survivors = tuple(rest.ranks)
        report.make_random_calls(rest, job, 5, Random(job.seed + 1))
        pycomm.barrier(group=rest)
        rest.close()
    except errors.Error as error:  # reported as a failure
        report.complaints.append(f"after the loss: {type(error).__name__}: {error}")


def strike(job: Job, group: Group, folder: str) -> None:
    """The victim ends by the action of the job."""
    Path(folder, STRUCK).write_text(str(time.monotonic()))
    match job.action:
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            while True:  # a SIGCONT does not end it
                os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(0)
        case "exception":
            raise Raised("by itself")
        case "abort":
            group.abort("by itself")


def _struck(folder: str) -> float | None:
    """When, as stored by the victim or its transport."""
    with contextlib.suppress(FileNotFoundError):  # no fault: ranks disagree
        return float(Path(folder, STRUCK).read_text())
    return None


def _usable(group: Group) -> bool:
    """Whether the next call that is right on every rank gives the right result."""
    x = pycomm.all_reduce(np.full(5, group.rank + 1.0), group=group)
    return bool((x == sum(range(1, group.size + 1))).all())


def _bury(group: Group, job: Job, folder: str) -> None:
    """Kills a stopped victim after all others have called this, so that the run ends."""
    Path(folder, f"reported{group.rank}").touch()
    if len(list(Path(folder).glob("reported*"))) == group.size - 1:
        with contextlib.suppress(ProcessLookupError):  # it ended already
            os.kill(group.peer_info()[job.victim].pid, signal.SIGKILL)
