"""`python -m benchmarks single_copy`: reads of another process's memory against shared slots.

Two ranks move float32 arrays that were just rewritten. `slots` is pycomm's call, whose data passes
through shared memory: a copy by the sender and one by the receiver. `read` and `write` are one copy
by the kernel, process_vm_readv by the receiver and process_vm_writev by the sender; `both` is half
by each. all_gather has no `write` or `both`, as its ranks read at the same time. A time is that of
the slower rank; the ways take turns.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import pycomm
from benchmarks.support import command
from pycomm.bench.collectives.worker import Barrier, barrier_file
from pycomm.bench.support import sizes
from pycomm.testing import run_ranks

WARM_UP = 3  # rounds
STEP_BYTES = 256 << 10  # of a call of the kernel
LIBC = ctypes.CDLL(None, use_errno=True)
READ, WRITE = "process_vm_readv", "process_vm_writev"


class Piece(ctypes.Structure):
    """iovec of <sys/uio.h>."""

    _fields_ = [("base", ctypes.c_void_p), ("bytes", ctypes.c_size_t)]


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores."""
    parser = command.parser("single_copy", __doc__, rounds=(30, "calls of each kind"))
    parser.add_argument(
        "--sizes", type=sizes.parse_sizes, default="1M,4M,16M,64M", help="(%(default)s)"
    )
    options = parser.parse_args(argv)
    with barrier_file(2) as flags:
        args = (flags, options.sizes, options.rounds)
        by_rank = run_ranks(2, _work, *args, processes=True, transport="shm", timeout_s=600)
    rows = []
    of_slots: dict[tuple[str, int], float] = {}
    for (call, size, way), us in by_rank[0].items():
        slowest = list(map(max, zip(us, by_rank[1][call, size, way], strict=True)))
        median = statistics.median(slowest)
        slots = of_slots.setdefault((call, size), median)
        row = {"call": call, "bytes": size, "way": way, "median_us": median}
        rows.append(row | {"worst_us": max(slowest), "slots_ratio": slots / median})
    command.report(options.json, settings=command.chosen(options, "rounds"), rows=rows)
    return 0


def _copy(name: str, pid: int, mine: int, theirs: int, bytes_: int) -> None:
    """READ or WRITE, in steps."""
    for at in range(0, bytes_, STEP_BYTES):
        count = min(STEP_BYTES, bytes_ - at)
        here, there = Piece(mine + at, count), Piece(theirs + at, count)
        done = getattr(LIBC, name)(pid, ctypes.byref(here), 1, ctypes.byref(there), 1, 0)
        if done != count:
            raise OSError(ctypes.get_errno(), f"{name} of process {pid}")


def _ways(group: pycomm.Group, x: Any, rows: Any) -> dict[tuple[str, str], Callable[[], object]]:
    """The calls to measure, by operation and way."""
    own = np.array([os.getpid(), x.ctypes.data], np.int64)
    pid, theirs = map(int, pycomm.all_gather(own, group=group)[1 - group.rank])
    mine, size, reads = x.ctypes.data, x.nbytes, group.rank == 1

    def copy(name: str, begin: int, end: int) -> Callable[[], object]:
        """The part of the rank that calls the function `name`; the other one only waits."""
        if reads != (name == READ):
            return lambda: None
        return lambda: _copy(name, pid, mine + begin, theirs + begin, end - begin)

    def gather() -> None:
        rows[group.rank] = x
        _copy(READ, pid, rows[1 - group.rank].ctypes.data, theirs, x.nbytes)

    return {
        ("broadcast", "slots"): lambda: pycomm.broadcast(x, 0, group=group),
        ("broadcast", "read"): copy(READ, 0, size),
        ("broadcast", "write"): copy(WRITE, 0, size),
        ("broadcast", "both"): copy(READ, 0, size // 2) if reads else copy(WRITE, size // 2, size),
        ("all_gather", "slots"): lambda: pycomm.all_gather(x[0], rows, group=group),
        ("all_gather", "read"): gather,
    }


def _work(
    group: pycomm.Group, flags: Path, bytes_: Sequence[int], rounds: int
) -> dict[tuple[str, int, str], list[float]]:
    """The microseconds of each call, by operation, bytes and way."""
    found: dict[tuple[str, int, str], list[float]] = {}
    barrier = Barrier(flags, group.rank, group.size)
    for size in bytes_:
        x, rows = (np.zeros((n, size // 4), np.float32) for n in (1, 2))
        ways = _ways(group, x, rows)
        for round_ in range(-WARM_UP, rounds):
            for (call, way), run in ways.items():
                x[:] = 2 * round_ + group.rank
                barrier()
                begin_s = time.perf_counter()
                run()
                barrier()
                took_s = time.perf_counter() - begin_s
                got = rows if call == "all_gather" else x
                right = [2 * round_, 2 * round_ + (call == "all_gather")]
                if [got.flat[0], got.flat[-1]] != right:
                    raise RuntimeError(f"{call} by {way} is wrong")
                if round_ >= 0:
                    found.setdefault((call, size, way), []).append(1e6 * took_s)
    return found
