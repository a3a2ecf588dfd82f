"""`pycomm tune`: measures at which sizes to switch algorithms, and stores the thresholds.

Alone it starts ranks on this machine, connected by tcp. Started on every host by a launcher
(`pycomm launch ... -m pycomm tune`) it measures the real network, and rank 0's machine stores the
result: rank 0's thresholds apply to the whole group. It takes seconds.

Measure with the number of ranks of later runs, or with 4: for 3 to 8 ranks the threshold of
`direct` is about the same. For 2 ranks both algorithms send the same amount and it is higher.
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

from pycomm import collectives, config, default_group, testing
from pycomm._bootstrap import thresholds
from pycomm.group import Group

SIZES = [2**power for power in range(10, 22)]  # 1 KiB to 2 MiB
ROUNDS = 7
CALLS = 6
FEW = 8  # kFewRanks of collectives/choose.cpp: with more ranks middle_bytes counts


@dataclass(frozen=True)
class Comparison:
    """Two algorithms of all_reduce: one for small arrays, one for large arrays."""

    small: str
    large: str


SMALL = Comparison("direct", "ring")
MIDDLE = Comparison("halving", "ring")


@dataclass(frozen=True)
class Found:
    """The result of a comparison: seconds by size, and the threshold in bytes."""

    comparison: Comparison
    seconds: list[tuple[float, float]]  # of the small and of the large algorithm
    bytes: int


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and stores the thresholds; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--ranks", type=int, default=4, help="number of ranks to start (%(default)s)"
    )
    options = parser.parse_args(argv)
    if options.ranks < 2:
        parser.error("invalid --ranks: expected at least 2")
    if config.environment().size > 1:
        own = default_group.init()
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
    print(f"{transport}: small_bytes {at[0]}, middle_bytes {at[1]}; stored in {file}")
    return 0


def measure(own: Group) -> tuple[str, list[Found]]:
    """Measures; called alike on every rank. Returns the group's slowest transport and the
    results."""
    names = {member.transport for member in own.peer_info()}
    transport = next(by for by in ("tcp", "shm", "local") if by in names)
    comparisons = [SMALL] if own.size <= FEW else [SMALL, MIDDLE]
    found = []
    with _progress(len(comparisons) * len(SIZES), own.rank == 0) as advance:
        for comparison in comparisons:
            seconds = []
            for size_bytes in SIZES:
                seconds.append(_compare(own, comparison, size_bytes))
                advance()
            found.append(Found(comparison, seconds, threshold(SIZES, seconds)))
    return transport, found


def threshold(sizes: Sequence[int], seconds: Sequence[tuple[float, float]]) -> int:
    """The size up to which to use the first algorithm, so that the total loss over all sizes is
    least.

    A loss is log(time / time of the faster one), so noise at one size has little effect. 0 if the
    first algorithm is never faster.
    """
    cuts = [0, *sizes]
    losses = []
    for cut in range(len(cuts)):
        taken = [pair[0 if i < cut else 1] for i, pair in enumerate(seconds)]
        losses.append(sum(math.log(t / min(pair)) for t, pair in zip(taken, seconds, strict=True)))
    return cuts[losses.index(min(losses))]


def table(found: Found) -> str:
    """The times of a comparison, and the choice at each size."""
    small, large = found.comparison.small, found.comparison.large
    lines = [f"{'# bytes':>10} {small + ' (us)':>14} {large + ' (us)':>14}  taken"]
    for size_bytes, (first, second) in zip(SIZES, found.seconds, strict=True):
        taken = small if size_bytes <= found.bytes else large
        lines.append(f"{size_bytes:>10} {first * 1e6:>14.1f} {second * 1e6:>14.1f}  {taken}")
    return "\n".join(lines)


def _compare(own: Group, comparison: Comparison, size_bytes: int) -> tuple[float, float]:
    """Seconds of an all_reduce with each algorithm: medians over alternating rounds, of the slowest
    rank."""
    x = np.zeros(size_bytes // 4, np.float32)
    rounds: tuple[list[float], list[float]] = ([], [])
    for turn in range(ROUNDS + 1):
        for which, algorithm in enumerate((comparison.small, comparison.large)):
            collectives.barrier(group=own)
            start = time.perf_counter()
            for _ in range(CALLS):
                collectives.all_reduce(x, group=own, algorithm=algorithm)
            if turn > 0:  # the first round connects and makes plans
                rounds[which].append((time.perf_counter() - start) / CALLS)
    medians = np.array([statistics.median(times) for times in rounds])
    collectives.all_reduce(medians, "max", group=own)
    return float(medians[0]), float(medians[1])


@contextmanager
def _progress(steps: int, shown: bool) -> Iterator[Callable[[], None]]:
    """A progress bar on a terminal's stderr if `shown`; yields a function that advances it."""
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
