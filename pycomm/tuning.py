"""`pycomm tune`: measures where one algorithm becomes faster than another, and keeps it.

Alone it starts ranks on this machine, which talk over tcp. Started on every host by a launcher
(`pycomm launch ... -m pycomm tune`) it measures the real network, and rank 0's machine keeps what
was found: rank 0's thresholds hold for a whole group (thresholds.py). It takes seconds.

Measure with as many ranks as will run, or with 4: of 3 to 8 ranks `direct` turns at about the same
size, while of 2 both algorithms send the same and the turn comes later.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np

from pycomm import collectives, config, group, testing, thresholds
from pycomm.group import Group

SIZES = [2**power for power in range(10, 22)]  # 1 KiB to 2 MiB
ROUNDS = 7
CALLS = 6
FEW = 8  # kFewRanks of collectives/choose.cpp: with more ranks middle_bytes counts


@dataclass(frozen=True)
class Comparison:
    """Two algorithms of all_reduce: which is for small arrays, which for large ones."""

    small: str
    large: str


SMALL = Comparison("direct", "ring")
MIDDLE = Comparison("halving", "ring")


@dataclass(frozen=True)
class Found:
    """What one comparison gave: seconds by size, and the threshold in bytes."""

    comparison: Comparison
    seconds: list[tuple[float, float]]  # of the small and of the large one
    bytes: int


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table, keeps the thresholds; the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--ranks", type=int, default=4, help="to start here (%(default)s)")
    options = parser.parse_args(argv)
    if options.ranks < 2:
        parser.error("there is nothing to choose with fewer than 2 ranks")
    if config.environment().size > 1:
        own = group.init()
        transport, found = measure(own)
    else:
        transport, found = testing.run_ranks(
            options.ranks, measure, transport="tcp", processes=True
        )[0]
    if config.environment().rank != 0:
        return 0
    at = list(thresholds.BUILT_IN)
    for one in found:
        print(table(one))
        at[0 if one.comparison == SMALL else 1] = one.bytes
    file = thresholds.save([(transport, at[0], at[1])])
    print(f"{transport}: small_bytes {at[0]}, middle_bytes {at[1]}; kept in {file}")
    return 0


def measure(own: Group) -> tuple[str, list[Found]]:
    """On every rank, alike: the slowest transport of the group, what each comparison gave."""
    names = {member.transport for member in own.peer_info()}
    transport = next(by for by in ("tcp", "shm", "local") if by in names)
    comparisons = [SMALL] if own.size <= FEW else [SMALL, MIDDLE]
    found = []
    with _progress(len(comparisons) * len(SIZES), own.rank == 0) as advance:
        for comparison in comparisons:
            seconds = []
            for size_bytes in SIZES:
                seconds.append(_duel(own, comparison, size_bytes))
                advance()
            found.append(Found(comparison, seconds, threshold(SIZES, seconds)))
    return transport, found


def threshold(sizes: Sequence[int], seconds: Sequence[tuple[float, float]]) -> int:
    """The size up to which the first algorithm is taken, so that all sizes together lose least.

    A loss is log(time taken / time of the better one), so that noise at one size turns nothing. 0
    where the first is never worth it.
    """
    cuts = [0, *sizes]
    losses = []
    for cut in range(len(cuts)):
        taken = [pair[0 if i < cut else 1] for i, pair in enumerate(seconds)]
        losses.append(sum(math.log(t / min(pair)) for t, pair in zip(taken, seconds, strict=True)))
    return cuts[losses.index(min(losses))]


def table(found: Found) -> str:
    """The times of a comparison, and where it turned."""
    small, large = found.comparison.small, found.comparison.large
    lines = [f"{'# bytes':>10} {small + ' (us)':>14} {large + ' (us)':>14}  taken"]
    for size_bytes, (first, second) in zip(SIZES, found.seconds, strict=True):
        taken = small if size_bytes <= found.bytes else large
        lines.append(f"{size_bytes:>10} {first * 1e6:>14.1f} {second * 1e6:>14.1f}  {taken}")
    return "\n".join(lines)


def _duel(own: Group, comparison: Comparison, size_bytes: int) -> tuple[float, float]:
    """Seconds of an all_reduce by each algorithm: medians over rounds in turn, of the slowest."""
    x = np.zeros(size_bytes // 4, np.float32)
    rounds: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for which, algorithm in enumerate((comparison.small, comparison.large)):
            collectives.barrier(group=own)
            start = time.perf_counter()
            for _ in range(CALLS):
                collectives.all_reduce(x, group=own, algorithm=algorithm)
            if turn > 0:  # the first makes connections and plans
                rounds[which].append((time.perf_counter() - start) / CALLS)
    medians = np.array([statistics.median(times) for times in rounds])
    collectives.all_reduce(medians, "max", group=own)
    return float(medians[0]), float(medians[1])


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A bar on a terminal's stderr, if asked for; gives what advances it."""
    done = 0
    shown = shown and sys.stderr.isatty()

    def advance() -> None:
        nonlocal done
        done += 1
        if shown:
            filled = 30 * done // steps
            print(f"\rmeasuring [{'#' * filled}{'.' * (30 - filled)}]", end="", file=sys.stderr)

    try:
        yield advance
    finally:
        if shown:
            print("\r\033[K", end="", file=sys.stderr, flush=True)
