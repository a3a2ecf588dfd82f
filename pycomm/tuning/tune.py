"""`pycomm tune`: measures at which sizes to switch algorithms, and stores the thresholds."""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TypeVar

import numpy as np
from rich.progress import track

from pycomm import collectives, config, default_group, testing
from pycomm._bootstrap import thresholds
from pycomm._tables import Table, console
from pycomm.group import Group

SIZES = [2**power for power in range(10, 22)]  # 1 KiB to 2 MiB
ROUNDS = 7
CALLS = 6
FEW = 8  # kFewRanks of collectives/choose.cpp: with more ranks middle_bytes counts
COMPARISONS = [("direct", "ring"), ("halving", "ring")]
"""Of small_bytes and of middle_bytes: the algorithm for small arrays, and the one for large."""

Seconds = list[tuple[float, float]]
"""By size: of the two algorithms of a comparison."""

T = TypeVar("T")


def main(options: argparse.Namespace) -> int:
    """Measures, prints a table and stores the thresholds; returns the exit status."""
    if config.environment().size > 1:
        transport, found = measure(default_group.init())
    else:
        transport, found = testing.run_ranks(
            options.ranks, measure, transport="tcp", processes=True
        )[0]
    if config.environment().rank != 0:
        return 0
    at = list(thresholds.BUILT_IN)
    for i, seconds in enumerate(found):
        at[i] = threshold(SIZES, seconds)
        console().print(table(COMPARISONS[i], seconds, at[i]))
    file = thresholds.save([(transport, at[0], at[1])])
    print(f"{transport}: small_bytes {at[0]}, middle_bytes {at[1]}; stored in {file}")
    return 0


def measure(own: Group) -> tuple[str, list[Seconds]]:
    """Measures; called alike on every rank. Returns the group's slowest transport and the
    results by comparison."""
    names = {member.transport for member in own.peer_info()}
    transport = next(by for by in ("tcp", "shm", "local") if by in names)
    comparisons = COMPARISONS[: 1 if own.size <= FEW else 2]
    cases = progress([(pair, size) for pair in comparisons for size in SIZES], own.rank)
    seconds = [_compare(own, *case) for case in cases]
    return transport, [seconds[i : i + len(SIZES)] for i in range(0, len(seconds), len(SIZES))]


def progress(items: Sequence[T], rank: int) -> Iterable[T]:
    """The items; rank 0 shows a progress bar if its output is a terminal."""
    if rank != 0 or not sys.stdout.isatty():
        return items
    # Without its thread, which would take processor time from the measured calls.
    return track(items, "measuring", auto_refresh=False, transient=True)


def threshold(sizes: Sequence[int], seconds: Sequence[tuple[float, float]]) -> int:
    """The size in bytes up to which to use the first algorithm; 0 if it is never faster.

    It minimizes the sum over all sizes of log(time / time of the faster algorithm), so noise at one
    size has little effect.
    """

    def loss(largest: int) -> float:
        pairs = zip(sizes, seconds, strict=True)
        return sum(math.log(pair[size > largest] / min(pair)) for size, pair in pairs)

    return min([0, *sizes], key=loss)


def table(comparison: tuple[str, str], seconds: Seconds, at_bytes: int) -> Table:
    """The times of a comparison, and the choice at each size."""
    small, large = comparison
    shown = Table({"# bytes": ">", f"{small} (us)": "12.1f", f"{large} (us)": "12.1f", "taken": ""})
    for size_bytes, (first, second) in zip(SIZES, seconds, strict=True):
        taken = small if size_bytes <= at_bytes else large
        shown.add(str(size_bytes), first * 1e6, second * 1e6, taken)
    return shown


def _compare(own: Group, algorithms: tuple[str, str], size_bytes: int) -> tuple[float, float]:
    """Seconds of an all_reduce with each algorithm: the slowest rank's median over rounds in which
    they alternate. Collective."""
    x = np.zeros(size_bytes // 4, np.float32)
    rounds: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for which, algorithm in enumerate(algorithms):
            collectives.barrier(group=own)
            start = time.perf_counter()
            for _ in range(CALLS):
                collectives.all_reduce(x, group=own, algorithm=algorithm)
            if turn > 0:  # the first round connects and makes plans
                rounds[which].append((time.perf_counter() - start) / CALLS)
    medians = np.array([statistics.median(times) for times in rounds])
    collectives.all_reduce(medians, "max", group=own)
    return float(medians[0]), float(medians[1])
