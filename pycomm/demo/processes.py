"""Runs one function on N fresh processes of this machine and hears what they have to say.

Not the launcher of training jobs: it serves the demo and the benchmarks, which start their own
ranks. No port is guessed: this process keeps the rendezvous store, on a port that the system gives,
while the ranks live.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # torch's stubs hide it
from torch.multiprocessing.spawn import ProcessContext, start_processes

from pycomm.demo import netns


@dataclass(frozen=True)
class Rank:
    """What a rank is told: its place, the store to meet at, and the way to speak to the parent."""

    rank: int
    size: int
    store: TCPStore
    say: Callable[[object], None]
    """Sends any picklable value to `hear` of the parent."""


def run(
    body: Callable[..., None],
    args: tuple[Any, ...],
    size: int,
    hear: Callable[[int, Any], None],
    hosts: Sequence[str] = (),
) -> None:
    """Runs `body(Rank, *args)` on `size` processes; `hear(rank, value)` gets all that they say.

    `body` is a function of an importable module; `hosts`, if any, has the host of each rank, as
    netns.behind() names them. Raises torch.multiprocessing's ProcessException,
    with the rank's traceback, when one fails. No process outlives the call, however it ends, nor a
    parent that is killed.
    """
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipes = [mp.get_context("spawn").Pipe(duplex=False) for _ in range(size)]
    ways_out = [way_out for _, way_out in pipes]
    context: ProcessContext = start_processes(  # type: ignore[no-untyped-call]  # torch's own
        _enter,
        (size, store.port, ways_out, hosts, body, args),
        size,
        join=False,
        start_method="spawn",
    )
    for way_out in ways_out:
        way_out.close()
    try:
        _listen(context, {way_in: rank for rank, (way_in, _) in enumerate(pipes)}, hear)
    finally:
        for process in context.processes:
            process.kill()
            process.join()


def _listen(
    context: ProcessContext, ways_in: dict[Connection, int], hear: Callable[[int, Any], None]
) -> None:
    over = False
    while ways_in or not over:
        for ready in wait([*ways_in, *context.sentinels]):
            if not isinstance(ready, Connection):
                over = context.join(timeout=0)
                continue
            try:
                value = ready.recv()
            except EOFError:  # its process ended; torch says why
                del ways_in[ready]
            else:
                hear(ways_in[ready], value)


def _enter(
    rank: int,
    size: int,
    port: int,
    ways_out: list[Connection],
    hosts: Sequence[str],
    body: Callable[..., None],
    args: tuple[Any, ...],
) -> None:
    # The parent's death arrives as SIGINT (set by torch): with Python's handler a rank that waits
    # in C++ would not notice it.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Else gloo needs a host name that resolves.
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "eth0" if hosts else "lo")
    for other, way_out in enumerate(ways_out):
        if other != rank:
            way_out.close()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    store = TCPStore("127.0.0.1", port, is_master=False)
    if hosts:  # the way to the store stays
        netns.enter(hosts[rank])
    body(Rank(rank, size, store, ways_out[rank].send), *args)
    if dist.is_initialized():
        dist.destroy_process_group()
