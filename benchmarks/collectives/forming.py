"""`python -m benchmarks forming`: how long groups of torch take to form, of pycomm and of gloo.

All ranks are processes of this machine and start a group at the same time; a time is that of the
slowest rank. The backends take turns. `first` is init_process_group() with torch imported and a new
store, store connections included; `later` new_group() of all ranks. `many` are later groups that
exist at once, each with one all_reduce of 4 floats; the last columns are what each of these takes
in a process.
"""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reliability.elastic_ranks import LIMIT_S, Child
from benchmarks.support import command
from benchmarks.support.ports import free_port

DIST: Any = dist  # torch's types lack the store
BACKENDS = ("gloo", "pycomm")
LOADED = ["torch.distributed", "pycomm.torch_backend"]
KINDS = ("first", "later", "many", "all_reduce")
MOST_RANKS = 256  # of all `first` groups together, and of `later` ones
MOST_DESCRIPTORS = 700  # of gloo's `many` groups; 1,024 are usual


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores."""
    parser = command.parser("forming", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4, 16], help="(2 4 16)")
    text = f"of first and of later groups, up to {MOST_RANKS} by the number of ranks (%(default)s)"
    parser.add_argument("--groups", type=int, default=40, help=text)
    parser.add_argument("--many", type=int, default=100, help="groups at once, up to (%(default)s)")
    options = parser.parse_args(argv)
    rows = []
    for ranks in options.ranks:
        groups = max(1, min(options.groups, MOST_RANKS // ranks))
        rows += measure(ranks, groups, max(1, min(options.many, MOST_DESCRIPTORS // (ranks + 3))))
    command.report(options.json, rows=rows)
    return 0


def measure(ranks: int, groups: int, many: int) -> list[dict[str, Any]]:
    """The rows of one number of ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    ports = [free_port() for _ in range(len(BACKENDS) * groups + 1)]
    children = [Child(context, _main, rank, ranks, ports, many) for rank in range(ranks)]
    found = [child.receive("found", 10 * LIMIT_S) for child in children]
    for child in children:
        child.end()
    rows = []
    for backend in BACKENDS:
        row: dict[str, Any] = {"ranks": ranks, "backend": backend, "groups": groups, "many": many}
        for kind in KINDS:
            every = zip(*(one[backend, kind] for one in found), strict=True)
            row |= command.median_and_worst(kind, [max(one) for one in every])
        first = found[0]
        rows.append(row | {name: first[backend, name] / many for name in _resources()})
    return rows


def _main(pipe: Connection, *given: Any) -> None:
    pipe.send(("found", _found(*given)))


def _resources() -> dict[str, float]:
    """Of this process."""
    memory = Path("/proc/self/smaps_rollup").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "kib": int(memory.partition("Pss:")[2].split()[0]),
    }


def _found(rank: int, size: int, ports: list[int], many: int) -> dict[tuple[str, str], Any]:
    """By backend: the milliseconds of each kind, and what all groups of `many` take."""
    limit = timedelta(seconds=LIMIT_S)
    meeting = DIST.TCPStore("127.0.0.1", ports[-1], size, rank == 0, limit)
    found: dict[tuple[str, str], Any] = {}

    def timed(backend: str, kind: str, form: Callable[[], Any]) -> Any:
        times = found.setdefault((backend, kind), [])
        key = f"{backend} {kind} {len(times)}"
        if meeting.add(key, 1) == size:
            meeting.set(f"{key} all", "")
        meeting.wait([f"{key} all"])
        begin_s = time.perf_counter()
        made = form()
        times.append(1e3 * (time.perf_counter() - begin_s))
        return made

    for number, port in enumerate(ports[:-1]):
        backend = BACKENDS[number % len(BACKENDS)]

        def init(backend: str = backend, port: int = port) -> None:
            where = f"tcp://127.0.0.1:{port}"
            dist.init_process_group(backend, where, limit, world_size=size, rank=rank)

        timed(backend, "first", init)
        timed(backend, "later", dist.new_group)
        dist.barrier()  # no rank closes the store of one that is forming
        if number >= len(ports) - 1 - len(BACKENDS):
            ones, before = torch.ones(4), _resources()
            for group in [timed(backend, "many", dist.new_group) for _ in range(many)]:
                timed(backend, "all_reduce", partial(dist.all_reduce, ones, group=group))
            for name, after in _resources().items():
                found[backend, name] = after - before[name]
            dist.barrier()
        dist.destroy_process_group()
    return found
