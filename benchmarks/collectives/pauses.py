"""`python -m benchmarks pauses`: single small calls after a pause, of gloo and of pycomm in its
place.

Programs make such calls once in a step: all_gather of sizes, all_reduce of a few counters,
broadcast_object_list of a description. All ranks sleep for --idle seconds, meet within about a
microsecond, and make one call; a time is that of the slowest rank. The backends take turns.
`alone` is pycomm in a group of one rank, where the call sends nothing: what torch itself takes.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.support import command
from pycomm import torch_backend
from pycomm.bench.collectives.table import p99
from pycomm.bench.collectives.worker import Barrier, barrier_file
from pycomm.bench.support import processes

BACKENDS = ("gloo", "pycomm", "alone")
WARM_UP = 20  # calls of each kind
OBJECTS = [{"method": "step", "tokens": 17, "ids": list(range(8))}]

Call = Callable[[Any], object]  # of a group


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores."""
    parser = command.parser(
        "pauses", __doc__, idle=(0.005, "the pause in s"), rounds=(1000, "calls of each kind")
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    command.add_names(parser, "calls", CALLS, CALLS)
    options = parser.parse_args(argv)
    if min(options.ranks) < 2 or options.rounds < 1 or options.idle <= 0:
        parser.error("2 ranks, 1 round and a pause are needed")
    rows = [
        row
        for ranks in options.ranks
        for row in measure(ranks, options.calls, options.rounds, options.idle)
    ]
    command.report(options.json, settings=command.chosen(options, "rounds", "idle"), rows=rows)
    return 0


def measure(ranks: int, calls: Sequence[str], rounds: int, idle_s: float) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    by_rank: list[Any] = [None] * ranks
    with barrier_file(ranks) as flags:
        args = (flags, calls, rounds, idle_s)
        processes.run(_work, args, ranks, by_rank.__setitem__)
    rows = []
    for call in calls:
        found = {
            backend: list(map(max, zip(*(of[call, backend] for of in by_rank), strict=True)))
            for backend in BACKENDS
        }
        for backend, us in found.items():
            row = {"call": call, "ranks": ranks, "backend": backend}
            rows.append(row | figures(us, found[BACKENDS[0]]))
    return rows


def figures(us: list[float], gloos: list[float]) -> dict[str, float]:
    """Median and 99th percentile in microseconds, and their ratios to gloo's."""
    median, far = statistics.median(us), p99(us)
    ratios = {"ratio": median / statistics.median(gloos), "p99_ratio": far / p99(gloos)}
    return {"median_us": median, "p99_us": far} | ratios


def _work(
    rank: processes.Rank, flags: Path, calls: Sequence[str], rounds: int, idle_s: float
) -> None:
    """Reports the microseconds of each call, by kind and backend."""
    dist.init_process_group("gloo", store=rank.store, rank=rank.rank, world_size=rank.size)
    groups = {"gloo": dist.group.WORLD}
    torch_backend.replace("gloo")
    groups["pycomm"] = dist.new_group(backend="gloo")
    groups["alone"] = dist.new_group([rank.rank], backend="gloo", use_local_synchronization=True)
    assert torch_backend.stats(groups["pycomm"])["groups_in_place_of_gloo"] == 2
    barrier = Barrier(flags, rank.rank, rank.size)
    found: dict[tuple[str, str], list[float]] = {}
    for name in calls:
        for _ in range(WARM_UP):
            for group in groups.values():
                CALLS[name](group)
        for _ in range(rounds):
            for backend, group in groups.items():
                time.sleep(idle_s)  # the pause that is measured
                barrier()
                begin_s = time.perf_counter()
                CALLS[name](group)
                took_s = time.perf_counter() - begin_s
                found.setdefault((name, backend), []).append(1e6 * took_s)
    rank.send(found)
    dist.barrier()
    dist.destroy_process_group()


def _all_gather(group: Any) -> None:
    """Of 6 int64."""
    ones = torch.ones(6, dtype=torch.int64)
    dist.all_gather([torch.empty_like(ones) for _ in range(group.size())], ones, group)


def _all_reduce(group: Any) -> None:
    """Of [4, ranks] int32."""
    dist.all_reduce(torch.ones(4, group.size(), dtype=torch.int32), group=group)


def _broadcast_object_list(group: Any) -> None:
    """Of one dictionary of 60 bytes pickled."""
    dist.broadcast_object_list(list(OBJECTS), group=group, group_src=0)


CALLS: dict[str, Call] = {
    "all_gather": _all_gather,
    "all_reduce": _all_reduce,
    "broadcast_object_list": _broadcast_object_list,
}
