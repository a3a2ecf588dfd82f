"""`python -m benchmarks reconfigure`: torch's reconfigure, of pycomm and of gloo.

A rank is killed, and a process that is up already takes its place, by `dist._reconfigure` on all
ranks. The handles are passed through pipes. `kill_ms` is the time from the kill until every rank
has made an all_reduce in the new group, `join_ms` that of the new process from its call of
`_reconfigure`. It needs torch 2.14.
"""

from __future__ import annotations

import multiprocessing
import random
import time
from collections.abc import Sequence
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.reliability.elastic_ranks import LIMIT_S, Child
from benchmarks.support import command

DIST: Any = dist  # torch's types have neither reconfigure nor the stores
LOADED = ["torch.distributed", "pycomm.torch_backend"]
BACKENDS = ("gloo", "pycomm")


def main(argv: Sequence[str]) -> int:
    """Measures, prints, stores; returns 2 if torch has no reconfigure."""
    parser = command.parser("reconfigure", __doc__, ranks=(8, ""), rounds=(20, "kills"))
    options = parser.parse_args(argv)
    if not hasattr(DIST, "_reconfigure"):
        command.CONSOLE.print(f"torch {torch.__version__} has no reconfigure: 2.14 is needed")
        return 2
    rows = [measure(name, options.ranks, options.rounds) for name in BACKENDS]
    command.report(options.json, rows=rows)
    return 0


def measure(backend: str, size: int, rounds: int) -> dict[str, Any]:
    """Replaces a rank `rounds` times."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(LOADED)
    choose, kills, joins = random.Random(size), [], []
    store = DIST.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    ranks = [Child(context, _main, backend, rank, size, store.port) for rank in range(size)]
    handles = [one.receive("handle") for one in ranks]
    connect(0, ranks, handles)
    for number in command.progress(range(rounds), f"{backend}, {size} ranks"):
        victim = choose.randrange(size)
        new = Child(context, _main, backend, victim, size, store.port)
        handle = new.receive("handle")
        killed_s = ranks[victim].kill()
        ranks[victim].end()
        ranks[victim], handles[victim] = new, handle
        times = connect(1 + number, ranks, handles)
        kills.append(1e3 * (max(end for _, end in times) - killed_s))
        joins.append(1e3 * (times[victim][1] - times[victim][0]))
    for one in ranks:
        one.end()
    in_all = command.median_and_worst("kill", kills) | command.median_and_worst("join", joins)
    return {"backend": backend, "ranks": size, "kills": rounds, **in_all}


def connect(number: int, ranks: Sequence[Child], handles: list[str]) -> list[tuple[float, float]]:
    """Reconfigures all; returns the begin and the end of each rank. The handles of a group differ
    from those before it: the new ones replace them."""
    for one in ranks:
        one.pipe.send((number, handles))
    found = [one.receive("times") for one in ranks]
    handles[:] = [handle for *_, handle in found]
    return [(begin_s, end_s) for begin_s, end_s, _ in found]


def _main(pipe: Connection, backend: str, rank: int, size: int, port: int) -> None:
    limit = timedelta(seconds=LIMIT_S)
    DIST.init_process_group(
        backend,
        rank=rank,
        world_size=size,
        store=DIST.TCPStore("127.0.0.1", port),
        timeout=limit,
        enable_reconfigure=True,
    )
    pipe.send(("handle", DIST._get_reconfigure_handle()))
    x = torch.ones(4)
    while True:
        number, handles = pipe.recv()
        begin_s = time.monotonic()
        DIST._reconfigure(number, handles, timeout=limit).wait()
        dist.all_reduce(x, dist.ReduceOp.MAX)
        end_s = time.monotonic()
        pipe.send(("times", (begin_s, end_s, DIST._get_reconfigure_handle())))
