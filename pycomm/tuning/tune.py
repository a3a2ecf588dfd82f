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
import time
from collections.abc import Sequence

import numpy as np

from pycomm import collectives, config, default_group, testing
from pycomm._bootstrap import thresholds
from pycomm.group import Group

SIZES = [2**power for power in range(10, 22)]  # 1 KiB to 2 MiB
ROUNDS = 7
CALLS = 6
FEW = 8  # kFewRanks of collectives/choose.cpp: with more ranks middle_bytes counts
COMPARISONS = [("direct", "ring"), ("halving", "ring")]
"""Of small_bytes and of middle_bytes: the algorithm for small arrays, and the one for large."""

Seconds = list[tuple[float, float]]
"""By size: of the two algorithms of a comparison."""


def main(argv: Sequence[str]) -> int:
    """Measures, prints a table and stores the thresholds; returns the exit status."""
    parser = argparse.ArgumentParser(prog="pycomm tune", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    text = "number of ranks to start (%(default)s)"
    parser.add_argument("--ranks", type=int, default=4, help=text)
    options = parser.parse_args(argv)
    if options.ranks < 2:
        parser.error("invalid --ranks: expected at least 2")
    if config.environment().size > 1:
        transport, found = measure(default_group.init())
    else:
        by_rank = testing.run_ranks(options.ranks, measure, transport="tcp", processes=True)
        transport, found = by_rank[0]
    if config.environment().rank != 0:
        return 0
    at = list(thresholds.BUILT_IN)
    for i, seconds in enumerate(found):
        at[i] = threshold(SIZES, seconds)
        print(table(COMPARISONS[i], seconds, at[i]))
    file = thresholds.save([(transport, at[0], at[1])])
    print(f"{transport}: small_bytes {at[0]}, middle_bytes {at[1]}; stored in {file}")
    return 0


def measure(own: Group) -> tuple[str, list[Seconds]]:
    """Measures; called alike on every rank. Returns the group's slowest transport and the
    results by comparison."""
    names = {member.transport for member in own.peer_info()}
    transport = next(by for by in ("tcp", "shm", "local") if by in names)
    comparisons = COMPARISONS[: 1 if own.size <= FEW else 2]
    return transport, [[_compare(own, pair, size) for size in SIZES] for pair in comparisons]


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


def table(comparison: tuple[str, str], seconds: Seconds, at_bytes: int) -> str:
    """The times of a comparison, and the choice at each size."""
    small, large = comparison
    lines = [f"{'# bytes':>10} {small + ' (us)':>14} {large + ' (us)':>14}  taken"]
    for size_bytes, (first, second) in zip(SIZES, seconds, strict=True):
        taken = small if size_bytes <= at_bytes else large
        lines.append(f"{size_bytes:>10} {first * 1e6:>14.1f} {second * 1e6:>14.1f}  {taken}")
    return "\n".join(lines)


def _compare(own: Group, algorithms: tuple[str, str], size_bytes: int) -> tuple[float, float]:
    """Seconds of an all_reduce with each algorithm: medians over alternating rounds, of the slowest
    rank."""
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
