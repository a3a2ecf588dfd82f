"""`python -m benchmarks forming`: how long a group of torch takes to form, of pycomm and of gloo.

All ranks start a group at the same time; a row has the time of the slowest rank. The backends take
turns. `first` is init_process_group() with torch imported and a new store, `later` new_group() of
all ranks. Store connections are part of `first`.
"""

from __future__ import annotations

import multiprocessing
import statistics
import time
import traceback
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch.distributed as dist

from benchmarks.reliability.elastic_ranks import LIMIT_S, Child
from benchmarks.support import command
from benchmarks.support.ports import free_port

DIST: Any = dist  # torch's types lack the store
BACKENDS = ("gloo", "pycomm")
LOADED = ["torch.distributed", "pycomm.torch_backend"]
Times = dict[tuple[str, str], list[float]]  # by backend and group, in seconds


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores."""
    parser = command.parser("forming", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="(2 4)")
    parser.add_argument("--groups", type=int, default=40, help="of each row (%(default)s)")
    options = parser.parse_args(argv)
    rows = [row for ranks in options.ranks for row in measure(ranks, options.groups)]
    command.report(options.json, rows=rows)
    return 0


def measure(ranks: int, groups: int) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    ports = [free_port() for _ in range(len(BACKENDS) * groups + 1)]
    children = [Child(context, _main, rank, ranks, ports) for rank in range(ranks)]
    by_rank: list[Times] = [child.receive("times") for child in children]
    for child in children:
        child.end()
    rows = []
    for backend, group in sorted(by_rank[0]):
        times = [by[backend, group] for by in by_rank]
        slowest = [1e3 * max(one) for one in zip(*times, strict=True)]
        rows.append(
            {
                "ranks": ranks,
                "group": group,
                "backend": backend,
                "median_ms": statistics.median(slowest),
                "best_ms": min(slowest),
                "worst_ms": max(slowest),
                "groups": groups,
            }
        )
    return sorted(rows, key=lambda row: (row["group"], row["backend"]))


def _main(pipe: Connection, rank: int, size: int, ports: list[int]) -> None:
    try:
        pipe.send(("times", _times(rank, size, ports)))
    except BaseException:  # reported by the parent process
        pipe.send(("error", traceback.format_exc()))


def _times(rank: int, size: int, ports: list[int]) -> Times:
    limit = timedelta(seconds=LIMIT_S)
    meeting = DIST.TCPStore("127.0.0.1", ports[-1], size, rank == 0, limit)
    found: Times = {}

    def timed(backend: str, group: str, form: Any) -> None:
        times = found.setdefault((backend, group), [])
        key = f"{backend} {group} {len(times)}"
        if meeting.add(key, 1) == size:
            meeting.set(f"{key} all", "")
        meeting.wait([f"{key} all"])
        begin_s = time.perf_counter()
        form()
        times.append(time.perf_counter() - begin_s)

    for number, port in enumerate(ports[:-1]):
        backend = BACKENDS[number % len(BACKENDS)]

        def init(backend: str = backend, port: int = port) -> None:
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group(backend, where, limit, world_size=size, rank=rank)

        timed(backend, "first", init)
        timed(backend, "later", dist.new_group)
        dist.barrier()  # no rank closes the store of one that is forming
        dist.destroy_process_group()
    return found
