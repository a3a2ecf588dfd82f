"""A rank of a benchmark run: checks every case, then times all contestants in turn."""

from __future__ import annotations

import contextlib
import functools
import gc
import mmap
import os
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from pycomm.bench.collectives.cases import Case, Run
from pycomm.bench.collectives.groups import Groups
from pycomm.bench.collectives.limits import copies
from pycomm.bench.collectives.peers import Peer
from pycomm.bench.collectives.verbs import Arrays, Call
from pycomm.bench.support.processes import Rank

BUSY_CALLS = 5
"""Of a round beside a busy thread, where each costs milliseconds of waiting for the interpreter."""

WARM_UP = 20
"""Calls of each contestant before any is timed, as other benchmarks of collectives have: pycomm may
run its trials in them."""

CPU = torch.device("cpu")
SLOT = 8  # int64 of a cache line: each rank's flag has its own


@dataclass(frozen=True)
class Times:
    """A rank's report of a case; `seconds[name][round]` is a list of single calls."""

    case: Case
    wrong: dict[str, int]  # by contestant
    refused: dict[str, str]  # why, by contestant that cannot do this case
    seconds: dict[str, list[list[float]]]  # contestants and copies


@contextlib.contextmanager
def barrier_file(size: int) -> Iterator[Path]:
    """The file of a Barrier of `size` ranks: SLOT int64 for each, how often it arrived."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(bytes(8 * size * SLOT))
        file.flush()
        yield Path(file.name)


class Barrier:
    """A barrier of the ranks of one host, within about a microsecond, independent of contestants.

    `flags` is of barrier_file().
    """

    def __init__(self, flags: Path, rank: int, size: int) -> None:
        with flags.open("r+b") as file:
            self._flags = memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
        self._mine = rank * SLOT
        self._others = [other * SLOT for other in range(size) if other != rank]
        self._times = 0

    def __call__(self) -> None:
        self._times += 1
        self._flags[self._mine] = self._times
        for other in self._others:
            looks = 0
            while self._flags[other] < self._times:
                looks += 1
                if looks > 100:  # the other may need this core
                    os.sched_yield()


def work(rank: Rank, flags: Path, peers: list[Peer], run: Run) -> None:
    """Reports one Times for each case of `peers`, which are some of the run's. On "cuda" each rank
    has the GPU of its number."""
    torch.set_num_threads(1)
    device = CPU if run.device == "cpu" else torch.device(run.device, rank.rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    groups = Groups(peers, rank.store, rank.rank, rank.size)
    barrier = Barrier(flags, rank.rank, rank.size)
    with busy_thread() if run.busy else contextlib.nullcontext():
        for case in run.cases:
            rank.send(measure(run, case, peers, groups.call, barrier, (rank.rank, device)))
    barrier()  # no rank leaves while another still needs it


@contextlib.contextmanager
def busy_thread() -> Iterator[threading.Thread]:
    """Within it, a thread of this process wants a processor and the interpreter at all times."""
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            sum(range(1000))

    thread = threading.Thread(target=compute, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        over.set()
        thread.join()


def calls_per_round(count_bytes: int) -> int:
    """Many for small sizes, that p99 means something; at least 2."""
    return max(2, min(100, 2**24 // max(count_bytes, 1)))


def measure(
    run: Run,
    case: Case,
    peers: list[Peer],
    call_of: Callable[[Peer, Arrays], Call],
    barrier: Callable[[], None],
    place: tuple[int, torch.device],
) -> Times:
    """One case; `place` is the rank, and the device of its arrays."""
    rank, device = place
    private = Arrays(case, rank, device=device)
    contestants: dict[str, tuple[Call, Callable[[], object]]] = {}
    times = Times(case, {}, {}, {})
    for peer in peers:
        barrier()
        try:
            arrays = private
            if peer.shares:
                if device.type != "cpu":
                    raise NotImplementedError("pycomm.empty allocates host memory only")
                arrays = Arrays(case, rank, shares=True)
            call = call_of(peer, arrays)
            wrong = arrays.wrong(call)  # also without a check: it may refuse the case
            times.wrong[peer.name] = wrong if peer.communicates and run.check else 0
        except (
            RuntimeError,
            ValueError,
            NotImplementedError,
        ) as error:  # the table shows the reason
            times.refused[peer.name] = str(error).splitlines()[0]
        else:
            contestants[peer.name] = call, arrays.rewrite
    ways, rewrite_source = copies(case.bytes, device)
    contestants |= {name: (copy, rewrite_source) for name, copy in ways.items()}
    series = functools.partial(timed, barrier=barrier, device=device)
    for call, rewrite in contestants.values():
        series(call, rewrite, run.warm_up)
    times.seconds.update({name: [] for name in contestants})
    calls = run.calls or calls_per_round(case.bytes)
    calls = min(calls, BUSY_CALLS) if run.busy else calls
    for name in turns(list(contestants), run.rounds):
        messages = case.kind.messages if name in times.wrong else 1
        seconds, _ = series(*contestants[name], calls)
        times.seconds[name].append([one / messages for one in seconds])
    return times


def turns(names: Sequence[str], rounds: int) -> Iterator[str]:
    """The names in each round, so that none always follows the same other one."""
    for turn in range(rounds):
        first = turn % len(names)
        yield from [*names[first:], *names[:first]]


def timed(
    call: Call,
    rewrite: Callable[[], object],
    calls: int,
    barrier: Callable[[], None],
    device: torch.device = CPU,
    pause_s: float = 0.0,
) -> tuple[list[float], list[float]]:
    """Seconds, and processor seconds of this process, of each of `calls` calls after one that warms
    up; before each is a pause, then all ranks start it together.

    On a device the time ends when the device is done; every contestant waits in the same way.
    """
    seconds, cpu_s = [], []
    through: Callable[[], object] = lambda: None  # noqa: E731 - what there is to wait for here
    if device.type != "cpu":
        through = functools.partial(torch.get_device_module(device.type).synchronize, device)
    gc.disable()
    for _ in range(calls + 1):
        rewrite()
        through()
        if pause_s:
            time.sleep(pause_s)  # the connections are idle, as during a computation
        barrier()
        cpu_start = time.process_time()
        start = time.perf_counter()
        call()
        through()
        seconds.append(time.perf_counter() - start)
        cpu_s.append(time.process_time() - cpu_start)
    gc.enable()
    return seconds[1:], cpu_s[1:]
